"""Low-rank products beside packed linears, which are multiplied together."""

from pathlib import Path

import pytest
import torch
from test_chains import MODELS, close, decoder_of, make_packed, one_by_one

from exl2flow.model import PackedLinear
from exl2flow.model.low_rank import with_low_rank
