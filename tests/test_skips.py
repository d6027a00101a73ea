"""The end of a run says what was skipped."""

from skips import describe_skips


def test_skips_are_counted_by_what_is_missing():
    reasons = ["chromium is not installed", "needs cc, aarch64-linux-gnu-gcc, qemu-aarch64-static", "a bad number"]
    reasons += ["the shared data is absent", "shared data is absent: /here (set GRADFILTER_SHARED)", "timm is not installed"]
    lines = describe_skips(reasons)
    assert lines[0].startswith("    2 for want of real images and weights: put pets.tar.gz")
    assert "    1 for want of Chromium: apt-get install chromium" in lines
    assert "    1 for want of a Python package: make setup (-rs says which one)" in lines
    assert "    1 for other reasons: -rs lists them" in lines
    assert len(lines) == 5
