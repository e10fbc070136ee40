from .delta import *
from .exchange import *
from .experts import *
from .latent import *
from .lora import *
from .matmul import *
from .vision import *
