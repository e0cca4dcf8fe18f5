"""Tables of tensors for views in notebooks: dtype, shape, range and mask of each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import torch

from deepspeed_gear.notebook_views import evenly, show_number, show_range, table_html

MOST_ELEMENTS = 1 << 16
HEADS = ["dtype", "shape", "range", "mean"]


def tensor_table(
    title: str, tensors: Iterable[tuple[str, torch.Tensor, torch.Tensor | None]]
) -> str:
    """Return a table with a row for each tensor.

    Args:
        title: Head of the column of names.
        tensors: Name, values [n, ...], and mask [n] or [n, T] of the values that are real; None:
            all are.
    Cost: reads at most 2^16 elements of a tensor, or one of its n parts if that has more.
    """
    rows = []
    has_masks = False
    for name, tensor, mask in tensors:
        real = "all" if mask is None or bool(mask.all()) else f"{float(mask.float().mean()):.1%}"
        has_masks = has_masks or mask is not None
        rows.append([name, *_cells(tensor, mask), real])
    if has_masks:
        return table_html([title, *HEADS, "real"], rows)
    return table_html([title, *HEADS], [row[:-1] for row in rows])


def _cells(tensor: torch.Tensor, mask: torch.Tensor | None) -> Iterator[str]:
    yield str(tensor.dtype).removeprefix("torch.")
    yield str(list(tensor.shape))
    values, is_whole = sampled_values(tensor, mask)
    about = "" if is_whole else " (sampled)"
    finite = values[np.isfinite(values)]
    num_left_out = len(values) - len(finite)
    if not len(finite):
        yield "no finite value" if num_left_out else "no value"
        yield ""
    elif tensor.dtype == torch.bool:
        yield f"{finite.mean():.3g} true{about}"
        yield ""
    else:
        odd = f", {num_left_out:,} not finite" if num_left_out else ""
        low = finite.min()
        high = finite.max()
        yield f"{show_range(low, high)}{odd}{about}"
        yield show_number(finite.mean())


@torch.no_grad()
def sampled_values(tensor: torch.Tensor, mask: torch.Tensor | None) -> tuple[np.ndarray, bool]:
    """Return real values of evenly spaced parts of a tensor, and whether those are all parts.

    Returns:
        [values], float64, in host memory.
    """
    if not tensor.numel() or not tensor.dim():
        return tensor.detach().double().reshape(-1).cpu().numpy(), True
    most = max(1, MOST_ELEMENTS // (tensor.numel() // tensor.size(0)))
    parts = torch.from_numpy(evenly(tensor.size(0), most))
    values = tensor.detach().index_select(0, parts.to(tensor.device)).cpu().double()
    if mask is not None:
        real = mask.index_select(0, parts.to(mask.device)).cpu()
        real = real.reshape(*real.shape, *[1] * (values.dim() - real.dim())).expand(values.shape)
        values = values[real]
    return values.reshape(-1).numpy(), len(parts) == tensor.size(0)
