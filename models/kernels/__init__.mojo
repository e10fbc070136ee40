from .matmul import *
