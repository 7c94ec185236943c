"""What the pools must hold, kept on the host in plain numpy: slot by slot."""

import ml_dtypes
import numpy as np


def quantize(rows: np.ndarray, inv_scale: np.ndarray) -> np.ndarray:
    """Codes of rows [..., heads, dim] as bytes, with ml_dtypes; NaN as 0x7f."""
    y = np.asarray(rows, np.float32) * np.asarray(inv_scale, np.float32)[:, None]
    y = np.where(np.isnan(y), y, np.clip(y, -448, 448)).astype(np.float32)
    return canonical(y.astype(ml_dtypes.float8_e4m3fn).view(np.uint8))


def canonical(codes: np.ndarray) -> np.ndarray:
    """Both NaN codes as one: their sign is nobody's promise."""
    return np.where(codes == 0xFF, 0x7F, codes).astype(np.uint8)


def pool_rows(k_pages, v_pages) -> tuple[np.ndarray, np.ndarray]:
    """Bytes of FP8 pools by slot: two of [num_slots, heads, dim]."""
    k = np.asarray(k_pages).view(np.uint8).transpose(0, 2, 1, 3)
    v = np.asarray(v_pages).view(np.uint8).transpose(0, 3, 1, 2)
    return tuple(canonical(x.reshape(-1, *x.shape[2:])) for x in (k, v))


class SlotOracle:
    """The BF16 row that each slot was last given, by layer; and what was observed."""

    def __init__(self, num_layers: int, num_slots: int, num_heads: int, dim: int):
        shape = (num_layers, 2, num_slots, num_heads, dim)
        self.rows = np.zeros(shape, ml_dtypes.bfloat16)
        self.written = np.zeros(num_slots, bool)
        self.amax = np.zeros((num_layers, 2, num_heads), np.float32)
        self.tokens_seen = 0

    def copy_pages(self, copies: np.ndarray, page_size: int) -> None:
        for source, destination in copies:
            if source < 0 or destination < 0:
                continue
            here = slice(source * page_size, (source + 1) * page_size)
            there = slice(destination * page_size, (destination + 1) * page_size)
            self.rows[:, :, there] = self.rows[:, :, here]
            self.written[there] = self.written[here]

    def append(self, slots: np.ndarray, rows: np.ndarray, *, observe: bool) -> None:
        """Takes rows [layers, 2, tokens, heads, dim] in order: the last one wins."""
        rows = rows.astype(ml_dtypes.bfloat16)
        for token, slot in enumerate(slots):
            if not 0 <= slot < self.written.size:
                continue
            self.rows[:, :, slot] = rows[:, :, token]
            self.written[slot] = True
            if observe:
                values = np.abs(rows[:, :, token].astype(np.float32))
                values = np.where(np.isfinite(values), values, 0)
                self.amax = np.maximum(self.amax, values.max(axis=-1))
                self.tokens_seen += 1

    def differing_bytes(self, cache, calibration) -> int:
        """Bytes of all pools that differ from one-shot quantization of the rows."""
        wrong = 0
        heads = self.rows.shape[3]
        for row, layer in enumerate(calibration.fp8_layers):
            pools = pool_rows(cache.k_pages[layer], cache.v_pages[layer])
            inverses = calibration.k_inv_scale[row], calibration.v_inv_scale[row]
            for which, (pool, inverse) in enumerate(zip(pools, inverses, strict=True)):
                inverse = np.broadcast_to(np.asarray(inverse), (heads,))
                want = quantize(self.rows[layer, which], inverse)
                want[~self.written] = 0
                wrong += int(np.sum(pool != want))
        return wrong
