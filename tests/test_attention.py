"""One new token's attention, either way: what is written out in float64, with cached keys that have room after them."""

from __future__ import annotations

import pytest
import torch

from agon_cli import attention
from agon_cli.attention import added, one_token, one_token_by_products


@pytest.mark.parametrize("attend", [one_token, one_token_by_products])
@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("masked", [False, True])
def test_a_new_token_reads_what_its_row_may_look_at(attend, queries, masked):
    made = torch.Generator().manual_seed(7)
    rows, keys, length, width, scale = 3, 2, 11, 8, 0.3
    query_BHD = torch.randn(rows, keys * queries, width, generator=made)
    roomy = torch.randn(2, rows, keys, length + 5, width, generator=made)
    key_BKSD, value_BKSD = roomy[0, :, :, :length], roomy[1, :, :, :length]
    may_BS = torch.ones(rows, length, dtype=torch.bool)
    may_BS[0, :4] = may_BS[2, :10] = False
    mask = may_BS[:, None, None] if masked else None
    if masked and attend is one_token_by_products:
        mask = added(may_BS.long(), keys)

    out_BHD = attend(query_BHD, key_BKSD, value_BKSD, mask, scale)

    for row in range(rows):
        look = may_BS[row] if masked else slice(None)
        for head in range(keys * queries):
            key_SD, value_SD = (part[row, head // queries][look].double() for part in (key_BKSD, value_BKSD))
            share_S = (scale * key_SD @ query_BHD[row, head].double()).softmax(0)
            torch.testing.assert_close(out_BHD[row, head].double(), share_S @ value_SD, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("rows", "heads", "keys", "threads", "waits"), [
    (1, 9, 3, 2, True),  # 2 key heads for one thread, 1 for the other; 5 and 4 when repeated
    (2, 9, 3, 2, False),
    (1, 9, 3, 1, False),
    (1, 4, 4, 3, False),
    (1, 16, 8, 16, True),
])  # fmt: skip
def test_keys_are_repeated_where_threads_would_wait_and_gradients_stay(
    monkeypatch, rows, heads, keys, threads, waits
):  # fmt: skip
    made, seen = torch.Generator().manual_seed(9), []
    sdpa = attention.sdpa_attention_forward

    def seeing(module, query, key, *rest, **kwargs):
        seen.append(key.shape[1])
        return sdpa(module, query, key, *rest, **kwargs)

    monkeypatch.setattr(attention, "sdpa_attention_forward", seeing)
    module = torch.nn.Module()
    module.num_key_value_groups, module.is_causal = heads // keys, True
    query, key, value, weight = (
        torch.randn(rows, count, 7, 8, generator=made) for count in (heads, keys, keys, heads)
    )  # fmt: skip

    def gradients(count: int) -> list[torch.Tensor]:
        monkeypatch.setattr(torch, "get_num_threads", lambda: count)
        leaves = [part.clone().requires_grad_() for part in (query, key, value)]
        out_BTHD, _ = attention.packed_sdpa(module, *leaves, None, scaling=0.3)
        (out_BTHD.transpose(1, 2) * weight).sum().backward()
        return [leaf.grad for leaf in leaves]

    for got, wanted in zip(gradients(threads), gradients(1), strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-5)
    assert seen == [heads if waits else keys, keys]
    with torch.no_grad():
        monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
        attention.packed_sdpa(module, query, key, value, None, scaling=0.3)
    assert seen[-1] == keys, "on the way forward alone no thread waits"
