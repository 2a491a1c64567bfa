"""P9: a running count gives each copy of a token its slot in its expert's buffer."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from tests.passes.styles.parts import EXPERTS, HIDDEN, TOP_K, WithStack, capacity_of

BLOCK = 4


class TutelCumsum(WithStack):
    """Slots from running sums of one-hot masks, one choice after the other."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        capacity = capacity_of(x.shape[0], TOP_K)
        dump = EXPERTS * capacity
        buffer = torch.zeros(dump + 1, HIDDEN, dtype=x.dtype, device=x.device)
        filled: Tensor | None = None
        slots, kept = [], []
        for k in range(TOP_K):
            chosen = ids[:, k]
            mask = torch.zeros(x.shape[0], EXPERTS, dtype=torch.long, device=x.device)
            mask = mask.scatter(1, chosen.unsqueeze(1), 1)
            places = torch.cumsum(mask, dim=0) - 1
            if filled is not None:
                places = places + filled
            filled = mask.sum(0, keepdim=True) if filled is None else filled + mask.sum(0, True)
            place = (places * mask).sum(dim=1)
            fits = place < capacity
            slot = torch.where(fits, chosen * capacity + place, dump)
            buffer = buffer.index_add(0, slot, x)
            slots.append(slot)
            kept.append(fits)
        y = self.batched(buffer[:dump].view(EXPERTS, capacity, HIDDEN)).view(-1, HIDDEN)
        y = torch.cat([y, torch.zeros(1, HIDDEN, dtype=y.dtype, device=x.device)])
        out = torch.zeros_like(x)
        for k in range(TOP_K):
            gate = weights[:, k] * kept[k].to(x.dtype)
            out = out + gate.unsqueeze(-1) * y.index_select(0, slots[k])
        return out


class MegablocksBinned(WithStack):
    """Sorted slots, cut off at the capacity of each bin."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        flat = ids.flatten()
        capacity = capacity_of(x.shape[0], TOP_K)
        dump = EXPERTS * capacity
        expert, order = torch.sort(flat, stable=True)
        counts = torch.bincount(flat, minlength=EXPERTS)
        start = torch.cumsum(counts, dim=0) - counts
        place = torch.arange(flat.shape[0], device=x.device) - start[expert]
        keep = place < capacity
        slot = torch.where(keep, expert * capacity + place, dump)
        token = order // TOP_K
        buffer = torch.zeros(dump + 1, HIDDEN, dtype=x.dtype, device=x.device).index_add(
            0, slot, x[token]
        )
        y = self.batched(buffer[:-1].view(EXPERTS, capacity, HIDDEN)).view(-1, HIDDEN)
        y = torch.cat([y, y.new_zeros(1, HIDDEN)])[slot]
        y = y * (weights.flatten()[order] * keep).unsqueeze(-1)
        return torch.zeros_like(x).index_add(0, token, y)


class VllmAlignBlock(WithStack):
    """Sorted slots, padded to whole blocks per expert; weights gathered by block."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        flat = ids.flatten()
        slots = flat.shape[0]
        blocks = (slots + EXPERTS * (BLOCK - 1) + BLOCK - 1) // BLOCK
        counts = torch.bincount(flat, minlength=EXPERTS)
        padded = (counts + BLOCK - 1) // BLOCK * BLOCK
        ends = torch.cumsum(padded, dim=0)
        expert, order = torch.sort(flat, stable=True)
        place = (
            torch.arange(slots, device=x.device) - (torch.cumsum(counts, dim=0) - counts)[expert]
        )
        slot_of = torch.full((blocks * BLOCK,), slots, dtype=torch.long, device=x.device)
        slot_of = slot_of.scatter(0, (ends - padded)[expert] + place, order)
        block_expert = torch.searchsorted(
            ends, torch.arange(blocks, device=x.device) * BLOCK, right=True
        )
        block_expert = block_expert.clamp(max=EXPERTS - 1)
        padded_x = torch.cat([x, x.new_zeros(1, HIDDEN)])
        rows = padded_x[slot_of // TOP_K].view(blocks, BLOCK, HIDDEN)
        gate = torch.bmm(rows, self.w1[block_expert].transpose(1, 2))
        up = torch.bmm(rows, self.w3[block_expert].transpose(1, 2))
        y = torch.bmm(functional.silu(gate) * up, self.w2[block_expert].transpose(1, 2))
        row_weights = torch.cat([weights.flatten(), weights.new_zeros(1)])[slot_of]
        y = y.view(-1, HIDDEN) * row_weights.unsqueeze(-1)
        out = torch.zeros(x.shape[0] + 1, HIDDEN, dtype=y.dtype, device=x.device)
        return out.index_add(0, slot_of // TOP_K, y)[:-1]
