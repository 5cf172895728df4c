"""The page in Chromium and Firefox: texts, branches, views, no network, hostile files, access."""

import gzip
import json
import re
import shutil

import pytest
import safetensors.torch
import tiny
import torch
from node_process import Node
from serving import serving
from tiny import VOCABULARY

from shakespeare import generate
from shakespeare.attention_ext import PARTS
from shakespeare.model.checkpoint import SUMS, load, save
from shakespeare.web import build

pytestmark = pytest.mark.full  # the page's kernels compile for minutes

# Where browsers differ: files, workers, the cache, the policy.
IN_BOTH = pytest.mark.parametrize("visit", ["chromium", "firefox"], indirect=True)
WITH_FRAMES = ("part1", "part2", "part3", "part4")  # others show the formula's
QUERY = {"model": "shakes256", "seed": "7", "length": 60}


def native(query: dict, **settings) -> str:
    """The text that a query's address shows, by the native engine."""
    weights = query.get("weights", "bf16")
    settings = {"temperature": 0.8, "top_k": 65, "prompt": "ROMEO:"} | settings
    settings |= {"max_new_tokens": query["length"], "seed": int(query["seed"]), "weights": weights}
    return generate(load(query["model"]), **settings)


@IN_BOTH
def test_texts_are_the_native_engines(visit, extension):
    queries = [
        QUERY | {"length": 250, "weights": "fp32"},
        QUERY | {"length": 1000, "context": "reset"},
        QUERY | {"model": "shakes1024", "temperature": 1.2, "topk": 20, "topp": 0.9, "prompt": "To be"},
    ]
    last = {"temperature": 1.2, "top_k": 20, "top_p": 0.9, "prompt": "To be"}
    expected = [native(queries[0]), native(queries[1], context="reset"), native(queries[2], **last)]
    assert visit("texts", queries=queries) == expected


def test_the_server_and_the_browser_write_the_same_text(visit, page_folder, extension):
    """On the page as `gpt.py serve` shows it."""
    pytest.importorskip("starlette", reason="the packages of serve are missing")
    query = {"model": "shakes256", "seed": "18446744073709", "length": 120, "weights": "fp32"}
    from shakespeare.app.server import Settings

    with serving(Settings(("shakes256",), page=page_folder)) as client:
        made = visit("server", query=query, home=f"http://127.0.0.1:{client.port}/")
    assert made["server"] == made["browser"] == native(query)
    assert made["server status"].startswith("120 characters by the server") and not made["server bars"]
    assert made["browser status"].startswith("120 characters with part4") and made["browser bars"]
    assert made["choice"] == "server"


SWIFTSHADER = ("--enable-unsafe-webgpu", "--use-webgpu-adapter=swiftshader")  # WebGPU on the CPU
FILTERS = {"temperature": 1.1, "topk": 20, "topp": 0.9, "typicalp": 0.95}
SAME_FILTERS = {"temperature": 1.1, "top_k": 20, "top_p": 0.9, "typical_p": 0.95}


def test_the_gpu_writes_the_texts_of_the_cpu_and_loses_none(visit, extension):
    """SwiftShader shows that it is right, never that it is fast."""
    if visit.browser != "chromium":
        pytest.skip("only Chromium brings SwiftShader for WebGPU")
    short = QUERY | {"length": 20}
    queries = [short, short | {"seed": "8"}, QUERY | FILTERS, short | {"temperature": 0}]
    queries.append(QUERY | {"model": "shakes128", "length": 130, "context": "reset"})  # beyond the window
    lost = QUERY | {"seed": "9", "length": 150, "pace": 150}
    made = visit("gpu", queries=queries, lost=lost, wall=2, flags=SWIFTSHADER)
    if not made["texts"]:
        pytest.skip(made["note"])
    expected = [native(queries[0]), native(queries[1]), native(queries[2], **SAME_FILTERS)]
    expected += [native(queries[3], temperature=0), native(queries[4], context="reset")]
    assert made["texts"] == expected
    assert all(" on google swiftshader" in by for by in made["by"])
    assert made["lost"]["text"] == native(lost) and "the GPU was lost" in made["lost"]["status"]
    wall = [native(lost | {"seed": 9 + i, "length": 100}) for i in range(2)]
    assert made["wall"]["texts"] == wall and made["wall"]["opened"] == wall[1]


def test_without_webgpu_a_sentence_says_why(visit):
    made = visit("gpu", queries=[{"length": 5}], lost={}, wall=1)
    assert re.match(r"The GPU cannot write: .*\.$", made["note"]) and not made["texts"]


@pytest.mark.parametrize(
    "query, model", [({}, "shakes256-bf16"), ({"model": "shakes128", "weights": "fp32"}, "shakes128-fp32")]
)
def test_the_weights_come_before_the_modules_and_once(visit, query, model):
    """Those that the page then loads, be it by the address or by the page's defaults, and no others."""
    expected = f"/models/{model}.planes.gz"
    answered = visit("early", query={"length": 5} | query, weights=expected)
    weights = [path for path in answered if path.endswith(build.WEIGHTS)]
    assert weights == [expected]
    assert answered.index(weights[0]) < answered.index("/js/main.js")


@pytest.mark.parametrize("lacks, writes", [("", True), ("connect-src 'self'; ", False)])
@IN_BOTH
def test_the_page_writes_under_its_policy_and_needs_it(visit, lacks, writes):
    assert visit("policy", lacks=lacks) == writes


def test_a_model_that_fails_or_is_late_is_never_replaced_by_another(visit, extension):
    made = visit("models", query=QUERY | {"seed": 7}, broken="shakes1024", late="shakes128")
    assert made["before"] == native(QUERY)
    assert made["said"] == "Models/shakes1024-bf16.planes.gz was not found (404)."
    assert made["after"] == [made["before"], True, True]
    assert made["text"] == native(QUERY | {"model": "shakes128", "seed": 8})
    assert "-m shakes128 " in made["command"]


def test_what_is_left_stops(visit):
    assert visit("left", query=QUERY) == "Stopped, because another view was shown."


def test_a_branch_is_kept_in_the_address(visit):
    made = visit("branch", query=QUERY, at=20)
    assert made["plain"][:20] == made["text"][:20] and made["plain"][20] != made["text"][20]
    assert f"branches=20%3A{ord(made['text'][20])}" in made["address"]
    assert made["again"] == made["text"] and len(made["text"]) == QUERY["length"]


@IN_BOTH
def test_all_parts_write_the_same_text_in_the_race(visit):
    """With a bar for the GPU, in Chromium, which brings SwiftShader for WebGPU."""
    flags = SWIFTSHADER if visit.browser == "chromium" else ()
    made = visit("race", window=256, count=8, flags=flags)
    assert len(made["texts"]) == 4 and set(map(len, made["texts"])) == {8} and len(set(made["texts"])) == 1
    assert all("ms a character" in time for time in made["times"])
    assert made["bars"] == 4 + made["status"].endswith("is a driver on the CPU, so it is slow.")
    assert made["bars"] == 4 + bool(flags)


def test_a_weight_is_named_with_both_characters(visit, node: Node):
    """The weight is one of the head that the view opens on."""
    i, j = 50, 47
    text = "ROMEO:" + native(QUERY)
    made = visit("attention", query=QUERY, i=i, j=j)
    node.load(precision="bf16")
    seen = node("observe", text=text)
    layer, head, _ = seen["telling"].values()
    assert (layer, head) != (0, 0)
    weight = node("weights", layer=layer, head=head)[i * len(text) + j]
    names = [f"“{ {' ': '␣', chr(10): '⏎'}.get(text[k], text[k]) }” at {k + 1}" for k in (i, j)]
    start = f"Layer {layer + 1}, head {head + 1}: {names[0]} gives {names[1]} the weight "
    assert made["said"].startswith(start) and made["maps"] == 16
    assert float(made["said"].removeprefix(start).rstrip(".")) == pytest.approx(weight, abs=2e-5)


def test_a_link_shows_the_weight_and_the_frame(visit):
    query = QUERY | {"layer": 2, "head": 1, "query": 49, "key": 46, "frame": 7}
    made = visit("link", query=query, other="#tiles?pace=0&length=60&part=part1&n=48&frame=30")
    assert re.match("Layer 3, head 2: “.” at 50 gives “.” at 47 the weight", made["said"])
    assert made["frame"].startswith("Frame 8 of") and "frame=8" in made["address"]
    assert made["other"].startswith("Frame 31 of") and made["title"].startswith("Tiles – ")


WRONG = """
    seed=-2 seed=18446744073709551616 length=0 length=1.5 length=1e9 temperature=-1 topp=0 window=5000
    l1=60 n=33 br=0 part=flash weights=int8 layer=-2 key=-2 frame=1.5 length= branches=3:65.5
    branches=0.5:65,:,3 model=constructor where=moon foo=1 __proto__=2
""".split()


@IN_BOTH
def test_the_address_keeps_all_choices_and_ignores_values_out_of_their_range(visit):
    choices = {"prompt": "To be, & not?\n#", "seed": "18446744073709551615", "temperature": 0, "br": 48}
    choices |= {"branches": "3:120", "topp": 0.777, "stop": "\n", "trainseed": 7, "pace": 0, "length": 5}
    many = [*WRONG, f"script={'x' * 4001}"]
    made = visit("address", choices=choices, wrong=many)
    assert made["kept"] == {name: str(value) for name, value in choices.items()}
    assert dict(zip(many, made["left"], strict=True)) == dict.fromkeys(many, {})
    assert made["random"] != "1337" and made["random"].isdigit()


def test_tiles_shows_every_part(visit):
    made = visit("tiles")
    assert list(made) == [name for name, part in PARTS.items() if part.operator]
    for part, shown in made.items():
        assert bool(shown["lines"]) == (part in WITH_FRAMES)
        assert len(set(shown["titles"])) == 4
        assert shown["bytes"][0] == shown["bytes"][2] and shown["bytes"][1] == shown["bytes"][3]  # at the end
        assert bool(shown["online"]) == (part == "part4")
    assert re.match(r"m = -?\d", made["part4"]["online"])
    in_all, ruled = (made["part4"][name][2:4] for name in ("bytes", "ruled"))
    assert all(a != b for a, b in zip(in_all, ruled))  # a window skips tiles


def test_a_script_is_shown_as_a_part_is_and_shared_by_its_address(visit):
    nests = build.nests()
    endless = "for i of 999999\n for j of 999999\n  if 0\n   read Q"
    link = {"pace": 0, "length": 60, "part": "script", "script": endless}
    made = visit("script", part="part2", other="part4", line="\nread P", link=link)
    assert made["own"]["in all"] == made["own"]["part2"] == made["part"]["in all"]
    assert made["first"] == made["undone"] == nests["part2"] and made["second"] == nests["part4"]
    at = nests["part2"].count("\n") + 2
    assert made["why"] == f"Line {at}: a known name was expected, not “P”."
    assert made["again"] == [f"{nests['part2']}\nread P", made["why"]]
    assert made["linked"] == [endless, made["linked"][1]] and "1,000,000 steps" in made["linked"][1]


def test_measure_draws_a_point_for_each_part(visit):
    made = visit("measure", flags=SWIFTSHADER)
    assert made["points"] == 4 and tuple(row[0] for row in made["rows"][:4]) == WITH_FRAMES
    if "The GPU is " not in made["status"]:  # another reason, such as a shader that is refused, is a fault
        assert len(made["rows"]) == 4
        assert re.search(r"The GPU was not measured: this browser (has no|finds no)", made["status"])
        return
    steps = [(title, float(rate)) for title, _, rate, *_ in made["rows"][4:]]  # a wrong one has no rate
    assert [title for title, _ in steps] == [f"step {n} on the GPU" for n in range(1, 6)]
    assert all(rate > 0 for _, rate in steps)


def test_the_page_is_small(page_folder):
    """Packed, without weights, all that a browser may ask for."""
    names = [name for name in build.files(page_folder) if not name.endswith(build.WEIGHTS)]
    sizes = {name: len(gzip.compress((page_folder / name).read_bytes())) for name in names}
    assert sum(sizes.values()) < 500_000, sizes
    for name in ("index.html", "style.css"):
        assert not re.search(r"(?:src|href)=\"(?:https?:)?//|url\(", (page_folder / name).read_text())


@IN_BOTH
def test_a_second_visit_needs_no_network(visit, extension):
    """A third visit needs none either. Only the page's own files and caches are touched."""
    made = visit("offline", query=QUERY, other=build.STAMP)
    assert made["texts"] == [native(QUERY)] * 2
    assert made["kept"] == {"other": True, "file": False}


@IN_BOTH
def test_a_text_is_learned_and_the_model_used_in_the_other_views(visit, extension, tmp_path):
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe" * 3000)
    (tmp_path / "large.txt").write_bytes(b"a" * 10_000_000)
    text = (build.WEB / "sonnets.txt").read_text()
    files = [str(tmp_path / "binary.txt"), str(tmp_path / "large.txt")]
    choices = {"width": 32, "layers": 1, "block": 32, "budget": "5000steps", "window": 256}
    zipped = tmp_path / "trained.zip"
    wrong = ["", "abc\0" * 1000, "\U0001f600" * 1500]
    made = visit("train", wrong=wrong, files=files, text=text, choices=choices, zip=str(zipped))
    for said, part in zip(
        made["said"],
        ["has 0 characters; it must have 2,000", "NUL", "U+FFFF only", "binary", "has 9.54 MB"],
        strict=True,
    ):
        assert part in said and said[0].isupper() and said.endswith(".")
    assert made["waits"] and re.match(r"[\d,]+ training steps in ", made["status"])
    assert re.match(r"After [\d,]+ .*: training loss \d\.\d+, on the held-out text \d\.\d", made["losses"])
    assert made["points"] >= 2 and len(made["sample"]) >= 240
    shutil.unpack_archive(zipped, tmp_path)
    record = json.loads((tmp_path / "trained" / "training.json").read_text())
    assert f"{record['test_loss']:.3f} on the test text" in made["status"]
    settings = {"temperature": 0.8, "top_k": 65, "seed": 1337}
    assert made["text"] == generate(load(tmp_path / "trained"), "ROMEO:", 20, **settings)
    assert len(made["raced"]) == 4 and len(set(made["raced"])) == 1


def test_a_model_without_an_end_writes_on_the_cpu(visit, extension, tmp_path):
    save(tmp_path, tiny.gpt(positions="alibi", window=3), VOCABULARY, {})
    fine = [str(tmp_path / name) for name in ("config.json", "meta.json", "model.safetensors")]
    made = visit("files", cases=[], fine=fine)
    assert made["text"] == generate(load(tmp_path), "abc", 5, temperature=0.8, top_k=65)
    assert made["note"] == "The GPU cannot write: it takes no model whose texts have no end."


@IN_BOTH
def test_wrong_files_give_a_sentence(visit, tmp_path):
    save(tmp_path / "tiny", tiny.gpt(), VOCABULARY, {})
    names = ("config.json", "meta.json", "model.safetensors")
    fine = [str(tmp_path / "tiny" / name) for name in names]
    weights = safetensors.torch.load_file(fine[2])
    safetensors.torch.save_file({name: w.half() for name, w in weights.items()}, fine[2])
    (tmp_path / "tiny" / SUMS).unlink()
    whole = (tmp_path / "tiny" / names[2]).read_bytes()
    huge = {name: torch.full_like(w, 3e38) if ".mlp." in name else w for name, w in weights.items()}
    contents = {
        "truncated": (whole[:-100], "It has"),
        "overflow": (safetensors.torch.save(huge), "Logits hold NaN"),
    }
    cases = []
    for name, (content, _) in contents.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / names[2]).write_bytes(content)
        cases.append([*fine[:2], str(tmp_path / name / names[2])])
    cases.append(fine[:1])
    made = visit("files", cases=cases, fine=fine)
    expected = [*(said for _, said in contents.values()), "with its config.json and meta.json"]
    for said, part in zip(made["said"], expected, strict=True):
        assert part.lower() in said.lower() and said[0].isupper() and said.endswith(".")
    assert made["text"] == generate(load(str(tmp_path / "tiny")), "abc", 5, temperature=0.8, top_k=65)
    query = {"model": "shakes128", "seed": "1337", "length": 5}
    assert made["other"] == native(query, prompt="abc")


@IN_BOTH
@pytest.mark.parametrize("width, scheme", [(360, "dark"), (1440, "light")])
def test_axe_finds_nothing_and_nothing_is_too_wide(visit, width, scheme):
    """Nor a picture without a text."""
    assert visit("axe", width=width, scheme=scheme) == []


@IN_BOTH
def test_tab_reaches_every_control(visit):
    made = visit("tabs")
    assert min(count for count, _ in made.values()) > 5  # the links to the views are some of them
    assert {view: missed for view, (_, missed) in made.items() if missed} == {}


def test_the_keyboard_is_enough(visit):
    assert visit("keyboard", query=QUERY) == "57"
