from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from kernels.reference import Layout, copy_blocks, paged_attention, write_kv

BLOCK = 4
NAN = float("nan")


def dense_attention(
    query: torch.Tensor,  # [heads, head_dim]
    keys: torch.Tensor,  # [seen, kv_heads, head_dim]
    values: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """One token's attention, head by head, from the definition."""
    group = query.shape[0] // keys.shape[1]
    heads = []
    for head, one in enumerate(query.double()):
        weights = torch.softmax(keys[:, head // group].double() @ one * scale, dim=0)
        heads.append(weights @ values[:, head // group].double())
    return torch.stack(heads)


@pytest.mark.parametrize("window", [None, 1, 5])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (6, 1)])
def test_attention_is_the_definition_for_chunks_and_single_tokens_mixed(
    heads: int, kv_heads: int, window: int | None
) -> None:
    torch.manual_seed(heads + kv_heads)
    spans = [(0, 1), (0, 9), (7, 1), (5, 6), (40, 1), (8, 4), (11, 1), (3, 1)]  # start, count
    order = iter(np.random.default_rng(0).permutation(np.arange(1, 64)))
    key_cache = torch.full((64, BLOCK, kv_heads, 8), NAN)
    value_cache = torch.full((64, BLOCK, kv_heads, 8), NAN)
    tables, histories = [], []
    for start, count in spans:
        length = start + count
        table = np.array(list(itertools.islice(order, -(-length // BLOCK))), np.int64)
        keys, values = torch.randn(length, kv_heads, 8), torch.randn(length, kv_heads, 8)
        at = np.arange(length)
        slots = torch.from_numpy(table[at // BLOCK] * BLOCK + at % BLOCK)
        write_kv(key_cache, value_cache, keys, values, slots)
        # A longer table than needed, as when room was granted ahead: its end holds NaN.
        tables.append(np.append(table, 63))
        histories.append((keys, values))
    starts, counts = [s for s, _ in spans], [c for _, c in spans]
    queries = torch.randn(sum(counts), heads, 8)
    layout = Layout.build(starts, counts, tables, BLOCK, torch.float32, torch.device("cpu"))
    out = paged_attention(queries, key_cache, value_cache, layout, window, 0.3)
    token = 0
    for (start, count), (keys, values) in zip(spans, histories, strict=True):
        for position in range(start, start + count):
            first = 0 if window is None else max(0, position + 1 - window)
            seen = slice(first, position + 1)
            expected = dense_attention(queries[token], keys[seen], values[seen], 0.3)
            torch.testing.assert_close(out[token].double(), expected, rtol=0, atol=2e-6)
            token += 1


def test_a_single_token_gets_the_same_bits_alone_and_in_any_company() -> None:
    torch.manual_seed(1)
    key_cache, value_cache = torch.randn(64, BLOCK, 2, 16), torch.randn(64, BLOCK, 2, 16)
    queries = torch.randn(12, 4, 16)
    rng = np.random.default_rng(2)
    lengths = rng.integers(1, 60, 12).tolist()
    tables = [rng.integers(1, 64, 15).astype(np.int64) for _ in lengths]

    def attended(which: list[int]) -> torch.Tensor:
        layout = Layout.build(
            [lengths[i] - 1 for i in which],
            [1] * len(which),
            [tables[i] for i in which],
            BLOCK,
            torch.float32,
            torch.device("cpu"),
        )
        return paged_attention(queries[which], key_cache, value_cache, layout, None, 0.25)

    together = attended(list(range(12)))
    for index in range(12):
        assert torch.equal(attended([index])[0], together[index])
    assert torch.equal(attended([5, 3, 11])[1], together[3])


def test_a_batch_too_large_to_gather_at_once_is_cut_without_a_trace() -> None:
    torch.manual_seed(3)
    size = 1024
    key_cache, value_cache = torch.randn(4, size, 1, 2), torch.randn(4, size, 1, 2)
    count = 200  # times 1024 slots: more than one gather takes
    queries = torch.randn(count, 1, 2)
    table = np.array([2], np.int64)
    layout = Layout.build(
        [size - 1] * count, [1] * count, [table] * count, size, torch.float32, torch.device("cpu")
    )
    assert len(layout.decodes) > 1
    out = paged_attention(queries, key_cache, value_cache, layout, None, 1.0)
    expected = torch.softmax(queries[:, 0] @ key_cache[2, :, 0].T, -1) @ value_cache[2, :, 0]
    torch.testing.assert_close(out[:, 0], expected, rtol=0, atol=1e-5)


def test_copies_move_whole_blocks_of_every_layer_and_touch_nothing_else() -> None:
    cache = torch.randn(3, 10, BLOCK, 2, 8)
    before = cache.clone()
    copy_blocks(cache, torch.tensor([1, 1, 7]), torch.tensor([4, 9, 2]))
    expected = before.clone()
    for source, target in ((1, 4), (1, 9), (7, 2)):
        expected[:, target] = before[:, source]
    assert torch.equal(cache, expected)
