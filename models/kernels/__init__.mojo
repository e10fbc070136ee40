from .exchange import *
from .experts import *
from .latent import *
from .matmul import *
