"""absmax: the largest finite magnitude of a batch of rows."""

from pallas_kernels.absmax.op import absmax as absmax
