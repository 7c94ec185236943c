"""Rewriting pages at new scales: from staged rows, or from the codes themselves."""

from pallas_kernels.kv_requantize.op import RequantizePlan as RequantizePlan
from pallas_kernels.kv_requantize.op import plan_requantize as plan_requantize
from pallas_kernels.kv_requantize.op import requantize_pages as requantize_pages
from pallas_kernels.kv_requantize.op import requantize_staged as requantize_staged
