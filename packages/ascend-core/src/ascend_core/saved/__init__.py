"""The first seam: what becomes of the tensors that autograd saves for backward.

    with region(keeper):        # one pair of hooks per thread, however many are entered
        loss = model(batch)     # saved tensors are offered to the keepers, who moves them last
    loss.backward()             # what a keeper claimed is asked back from its claim

A `Keeper` decides for each saved tensor: claim it (move it, rebuild it) or leave it. What nobody
claims goes to the pair of hooks that was there before, or stays where it is.

[Note: what hooks take away, and who gives it back]
PyTorch calls only the innermost pair of saved-tensor hooks, so two features that entered a pair
each would silently switch one off: there is one pair here, and keepers share it. A pair also
switches off autograd's check that a saved tensor was not written to before backward: `Packed`
carries the version, and raises autograd's own message. And autograd rebuilds a saved parameter
as a new tensor, which loses its Python attributes: `_parameters` gives them back.
"""

from __future__ import annotations

from ascend_core.saved._frame import Frame, backward_runs
from ascend_core.saved._packed import Packed, PackedParameter, Passed, Saved, written_to
from ascend_core.saved._parameters import is_weight
from ascend_core.saved._records import StorageRecord, StorageTable
from ascend_core.saved._region import Region, region
from ascend_core.saved.keeper import Claim, Keeper, Session

__all__ = [
    "Claim",
    "Frame",
    "Keeper",
    "Packed",
    "PackedParameter",
    "Passed",
    "Region",
    "Saved",
    "Session",
    "StorageRecord",
    "StorageTable",
    "backward_runs",
    "is_weight",
    "region",
    "written_to",
]
