"""What the committed benchmarks say of flops and bytes is what the code does today. Their times are not looked at."""

import json
from pathlib import Path

import pytest
import torch

from gradfilter.bench.setup import EXACT
from gradfilter.bench.sides import DEFAULT_PLANS, make_sides
from gradfilter.loss import StepLoss
from gradfilter.meter import BACKWARD, predict_step
from gradfilter.models import make_model

RESULTS = Path(__file__).parents[1] / "docs" / "results"
BATCH, PIXELS = 32, 224


@pytest.mark.parametrize("model", ["mobilenet_v2", "mcunet-in3", "efficientnet-lite0", "resnet18"])
@pytest.mark.parametrize("table", ["", "-alone"])
def test_flops_and_bytes_of_the_committed_tables(model, table):
    rows = json.loads((RESULTS / f"bench-{model}{table}.json").read_text(encoding="utf-8"))["rows"]
    found = {(row["batch"], row["method"]): (row["backward flops"], row["saved bytes"]) for row in rows}
    sides = make_sides(DEFAULT_PLANS)
    images, labels = torch.empty(BATCH, 3, PIXELS, PIXELS, device="meta"), torch.zeros(BATCH, dtype=torch.long)
    for name in (*DEFAULT_PLANS, *([] if table else [EXACT])):
        network = sides[name].make(make_model(model).train(), images)
        step = predict_step(network, (images,), StepLoss(None, labels))
        assert found[BATCH, name] == (step.count(BACKWARD), sum(step.saved_bytes.values())), name
