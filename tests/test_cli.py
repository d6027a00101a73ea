"""The command line: what `gradfilter check` prints, and what it says when it cannot."""

import os
import re
import subprocess
import sys
import textwrap
import warnings
from importlib.util import find_spec

import pytest
from torch import nn

from gradfilter.cli import main
from gradfilter.cli.screen import make_screen
from gradfilter.plan import Backward, Plan

NETS = """
    import torch
    from torch import nn

    @torch.library.custom_op("gradfilter_tests::cube", mutates_args=())
    def cube(x: torch.Tensor) -> torch.Tensor:
        return x**3

    cube.register_autograd(
        lambda ctx, gy: 3 * ctx.saved_tensors[0] ** 2 * gy,
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
    )

    class Custom(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Conv2d(3, 8, 3, padding=1)
            self.second = nn.Conv2d(8, 8, 3, padding=1)
            self.unused = nn.Linear(2, 2)

        def forward(self, x):
            y = self.second(cube(self.first(x)))
            return {"logits": y.mean((2, 3)), "extra": [y.flatten(1), "text"]}

    def plain():
        return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3, 2), nn.Flatten())

    class Tokens(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.mlp = nn.Conv2d(3, 8, 4, 4), nn.Linear(8, 8)

        def forward(self, x):
            return self.mlp(self.embed(x).flatten(2).transpose(1, 2).cumsum(1)).mean(1)

    tokens = Tokens
    custom = Custom
    number = 3
    returns_number = lambda: 3

    def wants_more(width):
        return nn.Conv2d(3, width, 3)

    def one_channel():
        return nn.Sequential(nn.Conv2d(1, 8, 3), nn.Flatten())
"""


@pytest.fixture
def nets(tmp_path, monkeypatch):
    """Write a user's module into the current directory; return its name, unused by other tests."""
    name = f"nets_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(textwrap.dedent(NETS))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    return name


def run(capsys, *args):
    code = main(["check", *args])
    out, err = capsys.readouterr()
    return code, out, err


def test_a_users_function(nets, capsys):
    code, out, err = run(capsys, f"{nets}:plain", "--patch", "4", "--resolution", "32")
    assert (code, err) == (0, "")
    assert "patch 4" in out
    assert "unexpected exits: none" in out
    assert "gradients: 6 of 6 trained parameters got one\n" in out
    assert "x fewer), batch 2 at 32 px" in out


def test_a_custom_operator_and_outputs_in_a_dictionary(nets, capsys):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        code, out, err = run(capsys, f"{nets}:custom", "--grid", "2", "--resolution", "16")
    assert (code, err) == (0, "")
    assert "first" in out
    assert "gradfilter_tests.cube" in out
    assert "unexpected exits: 1\n" in out
    assert "gradients: 4 of 6 trained parameters got one; exact backprop gives the other 2 none either" in out


def test_options_make_the_plan(nets, capsys, tmp_path):
    _, out, _ = run(
        capsys, f"{nets}:plain", "--plan", "last1", "--patch", "2", "--kernel", "lumped", "--resolution", "16", "--batch", "1"
    )
    assert "1 layer at patch resolution" in out
    assert "patch 2 lumped" in out
    Plan({"3": Backward(patch=3)}, rest="exact").save(tmp_path / "plan.yaml")
    _, out, _ = run(capsys, f"{nets}:plain", "--plan", "plan.yaml", "--resolution", "16")
    assert "rest exact" in out
    assert "patch 3" in out
    _, out, _ = run(capsys, f"{nets}:plain", "--plan", "plan.yaml", "--grid", "2", "--resolution", "16")
    assert "rest exact" in out
    assert "grid 2" in out


def test_images_have_the_models_own_size(capsys):
    code, out, _ = run(capsys, "cifar-resnet20", "--plan", "head")
    assert code == 0
    assert "0 layers at patch resolution" in out
    assert "batch 2 at 32 px" in out


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["{nets}:plain", "--plan", "absent.yaml"], ["absent.yaml"]),
        (["{nets}:plain", "--plan", "lats4"], ["'lats4' is no plan", "'last4'", ".yaml"]),
        (["{nets}:plain", "--patch", "0"], ["patch=0"]),
        (["{nets}:plain", "--resolution", "0"], ["--resolution 0"]),
        (["{nets}:plain", "--plan", "last9"], ["last 9", "has 2"]),
        (["{nets}:absent"], ["absent", "plain"]),
        (["{nets}:number"], ["int", "function"]),
        (["{nets}:returns_number"], ["returned a int", "torch.nn.Module"]),
        (["{nets}:wants_more"], ["TypeError", "width", "without arguments"]),
        (["{nets}:one_channel", "--resolution", "16"], ["[2, 3, 16, 16]", "without a plan", "--resolution"]),
        (["no_such_module:net"], ["no_such_module", "import statement"]),
        (["cifar-resnet21"], ["cifar-resnet21", "'cifar-resnet20'", "module:function"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_errors_say_what_was_given_and_what_to_do(args, words, nets, capsys):
    code, out, err = run(capsys, *(arg.format(nets=nets) for arg in args))
    assert code == 2
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    for word in words:
        assert word in err


def test_a_lost_gradient_is_no_success(nets, capsys, monkeypatch):
    monkeypatch.setattr(
        "gradfilter.cli.check.run_backward", lambda model, _: set() if hasattr(model[0], "_seen") else see(model)
    )

    def see(model: nn.Module) -> set[str]:
        model.get_submodule("0").register_buffer("_seen", None)
        return {name for name, _ in model.named_parameters()}

    code, out, _ = run(capsys, f"{nets}:plain", "--resolution", "16")
    assert code == 1
    assert "lost under the plan: 0.bias, 0.weight" in out


@pytest.mark.skipif(find_spec("timm") is None, reason="timm is not installed")
@pytest.mark.parametrize("name", ["torchvision/squeezenet1_1", "timm/test_resnet", "lraspp_mobilenet_v3_large"])
def test_networks_of_torchvision_and_timm(name, capsys):
    code, out, err = run(capsys, name, "--resolution", "64")
    assert (code, err) == (0, "")
    assert "saved bytes" in out


def test_the_module_runs_as_a_program(nets):
    source = os.pathsep.join(p for p in sys.path if p)
    command = [sys.executable, "-m", "gradfilter", "check", f"{nets}:plain", "--resolution", "16"]
    result = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": source}, check=False)
    assert (result.returncode, result.stderr) == (0, "")
    assert "unexpected exits: none" in result.stdout


def test_verify_compares_all_gradients_with_torchs_own(nets, capsys):
    code, out, err = run(capsys, f"{nets}:plain", "--patch", "2", "--resolution", "16", "--verify")
    assert (code, err) == (0, "")
    assert re.search(r"patch 1 against torch, float64: largest error \de-1\d\n$", out)


def test_tokens_filter_the_linear_layers_of_a_transformer(nets, capsys):
    code, out, _ = run(capsys, f"{nets}:tokens", "--patch", "2", "--tokens", "4", "--resolution", "16")
    assert code == 0
    assert re.search(r"mlp\s+patch 2 tokens 4\s+2\s", out)


@pytest.mark.parametrize("args", [["presets"], ["train", "--help"], ["nothing"]], ids=" ".join)
def test_a_reader_that_has_seen_enough_is_no_error(args):
    """As in `gradfilter presets | true`, or with 2>&1."""
    source = os.pathsep.join(p for p in sys.path if p)
    reading, writing = os.pipe()
    os.close(reading)
    out, err = (subprocess.DEVNULL, writing) if args == ["nothing"] else (writing, subprocess.PIPE)
    command = [sys.executable, "-m", "gradfilter", *args]
    done = subprocess.run(command, stdout=out, stderr=err, env={**os.environ, "PYTHONPATH": source}, check=False)
    os.close(writing)
    assert done.returncode in ((0, 141) if "--help" in args else (141,))  # argparse says nothing
    assert not done.stderr


def test_closed_streams(monkeypatch):
    """As with >&- and 2>&- in a shell: Python has None for them."""
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    assert main(["presets", "cifar10-resnet18-*"]) == 0
    assert main(["nothing"]) == 2
    make_screen(sys.stderr).tell("to nobody")
