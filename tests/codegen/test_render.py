"""The emitted text: deterministic, minimal, and at odds with no plan without saying so."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

import flashgen as fg
from flashgen.kernels.codegen import Source
from flashgen.kernels.codegen.environment import environment, render_template
from flashgen.kernels.codegen.text import comment
from flashgen.kernels.codegen.tidy import simplified
from flashgen.kernels.compile import compile
from flashgen.shared.paths import PATHS
from flashgen.spec.language.signature import split
from flashgen.spec.language.spec import AttentionSpec
from flashgen.tools.cli import app
from tests.support.paths import ROOT
from tests.support.processes import run_python
from tests.support.tiers import slow


def emitted(name: str, **changes: object) -> str:
    return fg.emit(fg.load(ROOT / f"specs/{name}.py").replace(**changes)).forward.text


@pytest.mark.slow
def test_the_same_spec_gives_the_same_bytes_in_every_process() -> None:
    script = (
        "import flashgen as fg, hashlib\n"
        "for name in ('strided', 'softcap', 'alibi'):\n"
        "    text = fg.emit(fg.load(f'specs/{name}.py')).forward.text\n"
        "    print(hashlib.sha256(text.encode()).hexdigest())\n"
    )
    done = run_python("-c", script, PYTHONHASHSEED="77")
    committed = (ROOT / "generated/DIGESTS").read_text()
    for name, digest in zip(("strided", "softcap", "alibi"), done.stdout.split(), strict=True):
        assert f"{digest[:16]}  {name}_forward_fp16_d64_sm_80.cu\n" in committed


GUARDED = """\
// The first function  //?? first
// has a comment of two lines.
template <int N>
__device__ void one() {
#pragma unroll  //?? loop
  for (int n = 0; n < N; ++n) {
    if (n) {  //?? n
      f(n,  //? even
        1);  //? even
    } else {
      g(n,
        2);
    }
  }
  int x = 0;  //? loop
}

int two = 2;
long_call(first,  //?? first
          /*% if n %*/
          second);
          /*% endif %*/
// End.
"""


@pytest.mark.parametrize("flags", range(16))
def test_a_guard_is_a_block_around_its_line_or_its_statement(flags: int) -> None:
    first, loop, n, even = (bool(flags >> i & 1) for i in range(4))
    names = {"first": first, "loop": loop, "n": n, "even": even}
    head = "// The first function\n// has a comment of two lines.\ntemplate <int N>\n"
    call = "      f(n,\n        1);\n" * even
    choice = f"    if (n) {{\n{call}    }} else {{\n      g(n,\n        2);\n    }}\n" * n
    body = f"#pragma unroll\n  for (int n = 0; n < N; ++n) {{\n{choice}  }}\n  int x = 0;\n" * loop
    tail = "long_call(first,\n" + "          second);\n" * n
    expected = f"{head}__device__ void one() {{\n{body}}}\n" * first
    expected += "\nint two = 2;\n" + tail * first + "// End.\n"
    assert environment().from_string(GUARDED).render(**names) == expected


def test_a_line_that_is_one_value_becomes_its_lines_indented_and_none_if_it_is_empty() -> None:
    template = "begin\n    /*{ value }*/\n  /*{ value }*/  //? twice\nx = /*{ value }*/;\nend\n"
    render = environment().from_string(template).render
    assert render(value="a;\n\n  b;\n", twice=False) == (
        "begin\n    a;\n\n      b;\nx = a;\n\n  b;\n;\nend\n"
    )
    assert render(value="a;", twice=True) == "begin\n    a;\n  a;\nx = a;;\nend\n"
    assert render(value="", twice=True) == "begin\nx = ;\nend\n"


def test_a_loop_of_one_round_becomes_its_body_at_index_0() -> None:
    loop = (
        "constexpr int ROUNDS = 1;\n"
        'extern "C" __global__ void kernel() {\n'
        "  UNROLL for (int i = 0; i < ROUNDS; ++i) {\n"
        "    load(full[i], start + 64 * i % QUERIES, head + 64 * i / QUERIES);\n"
        "    sum += row[start + 16 * i];  // of row i\n"
        "  }\n"
        "}"
    )
    body = simplified(loop).partition("kernel() {\n")[2]
    assert body == (
        "  load(full[0], start + 64 * 0 % QUERIES, head + 64 * 0 / QUERIES);\n"
        "  sum += row[start];  // of row i\n"
        "}"
    )


def unused(text: str) -> list[str]:
    """Functions and constants that nothing else in the file mentions."""
    found = re.findall(r"(?:\n *DEVICE [\w ]+?[ *&]|\nconstexpr int )(\w+)\b", text)
    assert found
    found = [name for name in found if name != "operator"]  # whose uses are brackets
    return [name for name in found if len(re.findall(rf"\b{name}\b", text)) < 2]


def test_every_function_in_an_emitted_file_is_called() -> None:
    for name in ("full", "causal", "dilated_window", "softcap"):
        for dtype, head_dim in (("float16", 64), ("float32", 40)):
            found = unused(emitted(name, dtype=dtype, head_dim=head_dim))
            assert not found, f"{name} {dtype} d{head_dim}: {found} is never called"


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", ["dense_bias", "symmetric_bias", slow("head_gate")])
def test_kernels_of_captured_gradients_have_what_they_call_alone(
    name: str, deterministic: bool
) -> None:
    dtype, head_dim = ("float32", 40) if deterministic else ("float16", 64)
    spec = fg.load(ROOT / f"specs/{name}.py").replace(dtype=dtype, head_dim=head_dim, dropout=True)
    for arch in PATHS:
        (*_, captured) = fg.emit(spec, arch, deterministic=deterministic).backward
        found = unused(captured.text)
        assert not found, f"{captured.filename}: {found} is never used"


def test_the_users_line_stands_above_the_code_made_from_it() -> None:
    text = emitted("sliding_window")
    assert "// specs/sliding_window.py:" in text
    assert "return (q >= k) & (q - k < window)" in text
    assert "p.s_window" in text


def test_a_file_without_a_mask_has_no_trace_of_masks_or_bounds() -> None:
    text = emitted("full")
    assert "mask_mod" not in text
    assert "tile_reach" not in text
    assert "tile_may" not in text


def test_a_mask_with_exact_bounds_is_never_classified_tile_by_tile() -> None:
    for name in ("causal", "causal_offset", "sliding_window", "prefix_lm", "block_causal"):
        text = emitted(name)
        assert "tile_may" not in text
        assert "tile_must" not in text


@pytest.mark.parametrize(
    ("constant", "complaint"),
    [
        ("SMEM_K", "Q tile"),
        ("SMEM_V", "K tile"),
        ("SMEM_BYTES", "V tile"),
        ("WARPS", "rows per warp"),
    ],
)
def test_a_plan_that_the_code_does_not_follow_fails_to_compile(
    constant: str, complaint: str
) -> None:
    text = emitted("causal")
    value = int(re.search(rf"constexpr int {constant} = (\d+)", text)[1])
    changed = max(1, value // 2)
    wrong = text.replace(
        f"constexpr int {constant} = {value}", f"constexpr int {constant} = {changed}"
    )
    assert wrong != text
    with pytest.raises(fg.CompileError, match="plan and code disagree") as caught:
        compile(wrong, filename="wrong.cu", kernel="causal_forward_fp16_d64", arch="sm_80")
    assert complaint in str(caught.value)


def test_a_template_field_that_nobody_gave_is_an_error_that_names_it() -> None:
    with pytest.raises(fg.RenderError, match=r"'\w+' is undefined") as caught:
        render_template("sm80/mma.cuh.j2")
    assert "templates/sm80/mma.cuh.j2" in caught.value.where


@pytest.mark.parametrize("arch", PATHS)
def test_no_line_of_a_kernel_of_split_keys_is_too_long_to_read(arch: str) -> None:
    spec = split(fg.load(ROOT / "specs/causal.py"))
    text = fg.emit(spec, arch, heads_per_tile=4).forward.text
    assert [line for line in text.splitlines() if len(line) > 100] == []


def test_products_of_served_scores_are_rounded_so_that_all_kernels_have_the_same_bits() -> None:
    """The compiler may fuse another product in a kernel with other rows in its tile."""

    def biased(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return score * (1.5 + h) + (score * q) ** 3 / 7 - k * score

    spec = AttentionSpec(None, biased, head_dim=96, name="products")
    served, trained = (fg.emit(s).forward.text for s in (split(spec), spec))
    body = re.compile(r"float score_mod\(.*?\n}", re.S)
    assert " * " not in body.search(served).group()  # type: ignore[union-attr]
    assert " * " in body.search(trained).group()  # type: ignore[union-attr]
    assert re.search(r"__fmul_rn\(product, p\.scale\)", served)
    assert re.search(r"product \* p\.scale", trained)


def test_a_spec_made_in_python_says_how_to_emit_it_again() -> None:
    spec = AttentionSpec(mask_mod=lambda b, h, q, k: q >= k, name="mine")
    text = fg.emit(spec).forward.text
    assert 'flashgen.emit(spec, arch="sm_80")' in text
    assert str(ROOT) not in text


def test_kernels_are_named_so_that_a_person_can_guess() -> None:
    source = fg.emit(
        fg.load(ROOT / "specs/causal.py").replace(head_dim=192, head_dim_v=128)
    ).forward
    assert source.name == "causal_forward_fp16_d192v128"
    assert source.filename == "causal_forward_fp16_d192v128_sm_80.cu"


@pytest.mark.parametrize("end", ["", "\\", "??/", " \\ \\", "\\??/ ", "\n", "\u2028int x;", "\x85"])
def test_a_comment_is_no_longer_than_its_lines(end: str) -> None:
    for text in (f"a{end}", f"{'word ' * 40}{end}", f"a\r\n#error{end}", end):
        for line in comment(text):
            assert line.startswith("//")
            assert line.isprintable()
            assert not line.endswith(("\\", "??/", " "))


def test_the_path_of_a_spec_with_line_breaks_and_quotes_stays_in_comments(tmp_path: Path) -> None:
    folder = tmp_path / 'a\n#error b \\ "c" */ ??/ \u2028 \udcff'
    folder.mkdir(parents=True)
    source = (ROOT / "specs/softcap.py").read_text()
    for name in ('"\n#error d\x85', "plain"):
        (folder / f"{name}.py").write_text(source)
    texts = [
        fg.emit(fg.load(folder / f"{name}.py").replace(name="same")).forward.text
        for name in ('"\n#error d\x85', "plain")
    ]
    assert texts[0] != texts[1]
    codes = [[line for line in text.split("\n") if not line.startswith("//")] for text in texts]
    assert codes[0] == codes[1]
    assert all(line.isprintable() for text in texts for line in text.split("\n"))


def derived_by(source: Source) -> str:
    """The command of a banner that derives the plan, as the banner says to make it."""
    lines = source.text.splitlines()
    made = next(line for line in lines if "GENERATED by" in line)
    again, says = lines[lines.index(made) + 1 : lines.index(made) + 3]
    ((word, option),) = re.findall(r'With "(.+?)"(?: and (\S+))? in place of "emit"', says)
    call = again.removeprefix("//").strip().replace("emit", word)
    return call.replace(")", f", {option})") if option else call


def test_the_command_of_a_banner_names_a_file_of_any_name(tmp_path: Path) -> None:
    file = tmp_path / "a spec (1).py"
    file.write_text("import flashgen as fg\nspec = fg.AttentionSpec(name='named', head_dim=64)\n")
    emitted = fg.emit(fg.load(file), arch="sm_80")
    for source, word in ((emitted.forward, "plan"), (emitted.backward[1], "plan --backward")):
        made, again, says = source.text.splitlines()[:3]
        assert "GENERATED" in made
        assert shlex.split(again)[1:] == ["flashgen", "emit", file.name, "--arch", "sm_80"]
        assert f'With "{word}" in place of "emit"' in says


def test_the_banner_says_how_the_plan_of_its_own_kernel_is_derived(
    capsys: pytest.CaptureFixture[str],
) -> None:
    import flashgen.kernels.planner  # noqa: F401  (the lines below name it)

    spec = AttentionSpec(lambda b, h, q, k: q >= k, head_dim=64, name="own")
    kernels = [
        [*emitted.backward, emitted.forward]
        for exact in (False, True)
        for emitted in (fg.emit(x, deterministic=exact) for x in (spec, fg.load("specs/causal.py")))
    ]
    pairs = (*zip(*kernels[:2], strict=True), *zip(*kernels[2:], strict=True))
    for source, in_file in pairs:
        if "in place of" not in source.text:
            assert source.plan.kernel in ("delta", "convert_dq")
            continue
        found = eval(derived_by(source), {"flashgen": fg, "spec": spec})
        assert source.plan in getattr(found, "kernels", (found,))
        words = derived_by(in_file).split()
        assert words[:2] == ["flashgen", "plan"]
        assert ("--backward" in words) is (source.plan.kernel != "forward")
        with pytest.raises(SystemExit) as ended:
            app(words[1:])
        assert ended.value.code in (None, 0)
        assert str(in_file.plan) in capsys.readouterr().out
