"""One new token's attention is what is written out in float64, with cached keys that have room after them."""

from __future__ import annotations

import pytest
import torch

from agon_cli.attention import one_token


@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("masked", [False, True])
def test_a_new_token_reads_what_its_row_may_look_at(queries, masked):
    made = torch.Generator().manual_seed(7)
    rows, keys, length, width, scale = 3, 2, 11, 8, 0.3
    query_BHD = torch.randn(rows, keys * queries, width, generator=made)
    roomy = torch.randn(2, rows, keys, length + 5, width, generator=made)
    key_BKSD, value_BKSD = roomy[0, :, :, :length], roomy[1, :, :, :length]
    may_BS = torch.ones(rows, length, dtype=torch.bool)
    may_BS[0, :4] = may_BS[2, :10] = False
    mask = may_BS[:, None, None] if masked else None

    out_BHD = one_token(query_BHD, key_BKSD, value_BKSD, mask, scale)

    for row in range(rows):
        look = may_BS[row] if masked else slice(None)
        for head in range(keys * queries):
            key_SD, value_SD = (part[row, head // queries][look].double() for part in (key_BKSD, value_BKSD))
            share_S = (scale * key_SD @ query_BHD[row, head].double()).softmax(0)
            torch.testing.assert_close(out_BHD[row, head].double(), share_S @ value_SD, rtol=0, atol=1e-5)
