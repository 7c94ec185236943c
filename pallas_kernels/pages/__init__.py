"""Pages as opaque things: make, copy, gather, read and write slots, shard."""

from pallas_kernels.pages.layout import PAD_SLOT as PAD_SLOT
from pallas_kernels.pages.layout import PageGeometry as PageGeometry
from pallas_kernels.pages.layout import make_pages as make_pages
from pallas_kernels.pages.layout import page_geometry as page_geometry
from pallas_kernels.pages.layout import read_slots as read_slots
from pallas_kernels.pages.layout import write_slots as write_slots
from pallas_kernels.pages.op import check_page_copies as check_page_copies
from pallas_kernels.pages.op import copy_pages as copy_pages
from pallas_kernels.pages.op import gather_sequences as gather_sequences
from pallas_kernels.pages.op import pages_sharding as pages_sharding
