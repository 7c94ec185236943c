"""kv_append: writes a batch of new K and V rows into the paged pools."""

from pallas_kernels.kv_append.op import kv_append as kv_append
from pallas_kernels.kv_append.plan import AppendPlan as AppendPlan
from pallas_kernels.kv_append.plan import plan_append as plan_append
from pallas_kernels.kv_append.reference import BothStatistics as BothStatistics
