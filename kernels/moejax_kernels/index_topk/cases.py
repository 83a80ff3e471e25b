"""Cases of index_topk."""

from moejax_kernels.sparse_attention.cases import MEASURED as MEASURED
from moejax_kernels.sparse_attention.cases import REAL as REAL
from moejax_kernels.sparse_attention.cases import SMALL as SMALL
