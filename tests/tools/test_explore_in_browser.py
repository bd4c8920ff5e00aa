"""`ringlet explore`'s page in a real browser: does it compute what the core computes, and can one use it?"""

import json

import pytest

import browser
from ringlet.schedule import schedule
from ringlet.schedule.collectives import ROOTED
from ringlet.schedule.explore import page
from ringlet.schedule.explore.embed import catalogue, known_sources
from ringlet.schedule.frames import frames_of
from ringlet.schedule.hosts import parse_hosts

pytestmark = pytest.mark.skipif(
    browser.executable() is None, reason="no chromium: install it, e.g. apt-get install chromium"
)

WORLDS = tuple(range(2, 17))
SOURCES = known_sources()


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("explore") / "page.html"
    names = [name for name, collective, _ in SOURCES if collective == "all_reduce"]
    start = {"collective": "all_reduce", "a": names[0], "b": names[1]}
    path.write_text(page(catalogue(SOURCES, WORLDS, start)), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def chromium():
    with browser.running() as started:
        yield started


@pytest.fixture
def opened(chromium, file):
    """Opens the page at an address; at the end nobody may have complained, or asked for anything."""
    tabs = []

    def open_page(address="", width=1280, height=900, **media):
        tab = browser.Tab(chromium)
        tabs.append(tab)
        tab.size(width, height, mobile=width < 500)
        tab.media(**media)
        tab.call("Page.navigate", url=f"{file.as_uri()}{address}")
        tab.wait("document.readyState == 'complete' && document.body.dataset.ready")
        return tab

    yield open_page
    for tab in tabs:
        complaints = ("Runtime.exceptionThrown", "Log.entryAdded", "Runtime.consoleAPICalled")
        told = [event["params"] for event in tab.events if event["method"] in complaints]
        asked = [e["params"]["request"]["url"] for e in tab.events if e["method"] == "Network.requestWillBeSent"]
        tab.call("Page.close")
        assert not told
        assert [url for url in asked if not url.startswith((file.as_uri(), "data:"))] == []


def state(tab):
    return tab.value("ringlet.state()")


def settled(tab, change):
    """Makes a change and waits until the page has taken it in."""
    before = tab.value("document.body.dataset.ready")
    change()
    tab.wait(f"document.body.dataset.ready > {before}")


def choose(tab, name, value):
    event = "input" if name in ("ranks", "scrub") else "change"
    tab.value(
        f"(() => {{ const e = document.getElementById('{name}'); e.value = {json.dumps(value)};"
        f"e.dispatchEvent(new Event('{event}', {{bubbles: true}})); }})()"
    )


def text(tab, selector):
    return tab.value(f"document.querySelector({json.dumps(selector)}).textContent")


# --- is it true?

# What the page has unpacked, of every algorithm at these places.
UNPACKED = """(async (places) => {
  const found = [];
  for (const row of ringlet.data.algorithms) {
    for (const [world, hosts, root] of places) {
      const scene = await ringlet.load(row, world, hosts, root);
      const held = scene?.frames.map((frame, m) => frame.map((boxes) => Array.from({length: scene.parts}, (_, box) =>
        boxes[box] ? [boxes[box].origin, boxes[box].ranks, boxes[box].until <= m] : null)));
      found.push(scene && [scene.hosts, held]);
    }
  }
  return found;
})"""


def test_the_page_unpacks_what_python_has_packed(opened):
    places = [(5, "", 0), (5, "3,2", 4), (8, "4x2:cyclic", 0)]
    found = iter(opened().value(f"{UNPACKED}({json.dumps(places)})"))
    for name, collective, _ in SOURCES:
        for world, hosts, root in places:
            got, on = next(found), parse_hosts(hosts or f"1x{world}")
            if root and collective not in ROOTED:
                assert got is None
                continue
            made = schedule(name, collective, world=world, root=root, hosts=on if hosts else None)
            drawn = frames_of(made)
            held = [
                [
                    [chunk and [*chunk, (m, r, b) in drawn.spent] for b, chunk in enumerate(boxes)]
                    for r, boxes in enumerate(f)
                ]
                for m, f in enumerate(drawn.frames)
            ]
            assert got == [list(on), held], made.name


def test_the_grown_sum_is_the_provers_tree(opened):
    grown = opened("#a=butterfly&b=&ranks=8&rank=5&box=0&at=3")
    assert text(grown, "#held-a") == "Rank 5: (((0+1)+(2+3))+((4+5)+(6+7)))"


# --- can one use it?


def test_play_pause_step_and_scrub(opened):
    tab = opened()
    rounds = int(tab.value("ringlet.player.end"))
    assert rounds > 2 and text(tab, "#where") == f"0 of {rounds} rounds"
    tab.click("#next")
    tab.wait("ringlet.player.position == 1")
    assert "after 1 of" in text(tab, "#told-a")
    tab.click("#back")
    tab.wait("ringlet.player.position == 0")
    tab.key("End")
    assert tab.value("ringlet.player.position") == rounds
    assert "all ranks hold their result" in text(tab, "#told-a")
    choose(tab, "scrub", 1.5)
    assert text(tab, "#where") == f"1 of {rounds} rounds"
    assert tab.value("document.querySelectorAll('#stage-a .parcel').length") > 0
    tab.click("#play")
    tab.wait("ringlet.player.playing && ringlet.player.position > 1.6")
    assert tab.value("document.getElementById('play').getAttribute('aria-label')") == "Pause"
    tab.click("#play")
    at = tab.value("ringlet.player.position")
    assert not tab.value("ringlet.player.playing") and 1.6 < at < rounds
    assert state(tab)["at"] == at
    tab.key("Home")
    assert tab.value("ringlet.player.position") == 0


def test_boxes_fill_as_contributions_arrive(opened):
    tab = opened("#a=ring&b=&ranks=4")
    heights = "[...document.querySelectorAll('#stage-a .cell-fill')].map((e) => parseFloat(e.style.height))"
    start = tab.value(heights)
    assert len(start) == 16
    tab.key("End")
    end = tab.value(heights)
    assert all(b == pytest.approx(4 * a, rel=0.03) for a, b in zip(start, end, strict=True))


def test_everything_is_changed_in_the_page(opened):
    tab = opened("#a=ring&ranks=8")
    settled(tab, lambda: choose(tab, "ranks", "3"))  # the fourth world: 5
    assert state(tab)["ranks"] == 5 and tab.value("document.querySelectorAll('#stage-a .card').length") == 5
    settled(tab, lambda: choose(tab, "collective", "broadcast"))
    assert state(tab)["a"] == "tree" and not tab.value("document.getElementById('root-choice').hidden")
    settled(tab, lambda: choose(tab, "root", "3"))
    assert "Rank 3 gives its buffer" in text(tab, "#lead")
    settled(tab, lambda: choose(tab, "hosts", "3,2"))
    assert tab.value("document.querySelectorAll('#stage-a .host').length") == 2


def test_two_side_by_side(opened):
    tab = opened("#a=ring&b=butterfly&ranks=8")
    assert text(tab, "#headline") == "ring beside butterfly"
    tab.key("End")
    assert "done after 14 rounds" in text(tab, "#told-a") and "done after 3 rounds" in text(tab, "#told-b")
    settled(tab, lambda: choose(tab, "b", ""))
    assert (
        text(tab, "#headline") == "ring"
        and tab.value("getComputedStyle(document.querySelector('.stage.b')).display") == "none"
    )


def test_keys(opened):
    tab = opened("#a=ring&b=&ranks=4")
    tab.key("ArrowRight")
    tab.wait("ringlet.player.position == 1")
    tab.key("ArrowLeft")
    tab.wait("ringlet.player.position == 0")
    tab.key("End")
    assert tab.value("ringlet.player.position == ringlet.player.end")
    tab.key("Home")
    assert tab.value("ringlet.player.position") == 0
    tab.key(" ")
    assert tab.value("ringlet.player.playing")
    tab.key(" ")
    assert not tab.value("ringlet.player.playing")
    tab.value("document.getElementById('collective').focus()")
    tab.key("End")
    assert tab.value("ringlet.player.position") < 6, "a field keeps its own keys"


def test_a_link_leads_to_the_same_view(opened):
    tab = opened("#collective=reduce&a=tree&b=star&ranks=6&root=4&hosts=3x2&at=1&rank=4&box=0")
    for address in (tab.value("location.hash"), "#" + tab.value("location.hash")[1:] + "&nonsense=1&at=1"):
        again = opened(address)
        assert state(again) == state(tab)
    shown = state(tab)
    assert (shown["root"], shown["hosts"], shown["at"], shown["rank"]) == (4, "3x2", 1, 4)
    tab.call("Page.bringToFront")  # nothing moves in a tab behind another
    tab.key("ArrowRight")
    tab.wait("location.hash.includes('at=2')")
    before = tab.value("document.body.dataset.ready")
    tab.value("location.hash = '#collective=all_gather&a=ring&ranks=3'")
    tab.wait(f"document.body.dataset.ready > {before}")
    assert text(tab, "#headline").startswith("ring") and state(tab)["ranks"] == 3


@pytest.mark.parametrize("wrong", ["ranks=99&a=none", "collective=%3Cb%3E", "at=-5&ranks=NaN", "hosts=7x7&root=40"])
def test_a_wrong_link_leads_to_something_that_there_is(wrong, opened):
    tab = opened(f"#{wrong}")
    assert tab.value("document.querySelectorAll('#stage-a .card').length") == state(tab)["ranks"]
    assert tab.value("ringlet.player.position") == 0


def test_a_pressed_box_shows_how_its_sum_grows(opened):
    tab = opened("#a=ring&b=&ranks=5")
    tab.value(
        "document.querySelectorAll('#stage-a .card')[2].querySelectorAll('.cell')[3].dispatchEvent(new Event('click'))"
    )
    assert (state(tab)["rank"], state(tab)["box"]) == (2, 3)
    held = [text(tab, "#held-a")]
    for _ in range(8):
        tab.value("ringlet.player.jump(ringlet.player.position + 1)")
        held.append(text(tab, "#held-a"))
    assert held[0] == "Rank 2, chunk 3: 2" and held[-1] == "Rank 2, chunk 3: ((((0+4)+1)+2)+3)"


def test_less_motion_where_it_is_asked_for(opened):
    tab = opened("#a=ring&b=&ranks=4", prefers_reduced_motion="reduce")
    tab.key("ArrowRight")
    assert tab.value("ringlet.player.position") == 1, "no way between"
    tab.key(" ")
    positions = set()
    while tab.value("ringlet.player.playing"):
        positions.add(tab.value("ringlet.player.position"))
    assert len(positions) > 1 and all(position == int(position) for position in positions)
    assert tab.value("ringlet.player.position == ringlet.player.end")


def test_rounds_are_told_to_readers_of_the_screen(opened):
    tab = opened("#a=ring&b=&ranks=5")
    tab.click("#next")
    tab.wait("ringlet.player.position == 1 && !ringlet.player.playing")
    assert tab.value("document.getElementById('told-a').getAttribute('aria-live')") == "polite"
    assert text(tab, "#told-a") == (
        "ring, after 1 of 8 rounds: 0 of 5 ranks hold their result. "
        "Next, round 1: every rank r sends chunk r−2 to rank r+1; the receiver adds it to its own."
    )
    tab.call("Accessibility.enable")
    nodes = tab.call("Accessibility.getFullAXTree")["nodes"]
    unnamed = [
        node["role"]["value"]
        for node in nodes
        if not node.get("ignored")
        and node["role"]["value"] in ("button", "combobox", "slider", "radio", "image", "table")
        and not node.get("name", {}).get("value")
    ]
    assert unnamed == []


# --- how does it look?

CONTRAST = """(() => {
  const canvas = new OffscreenCanvas(1, 1).getContext("2d", {willReadFrequently: true});
  const rgb = (colour) => {
    canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const luminance = ([r, g, b]) => [r, g, b].map((v) => v / 255)
    .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (element, x, y) => {
    const stack = document.elementsFromPoint(x, y);
    for (const found of stack) {
      if (element instanceof SVGElement && (found === element || element.contains(found))) continue;
      const style = getComputedStyle(found);
      const drawn = found instanceof SVGElement && !(found instanceof SVGSVGElement);
      const paint = found.tagName === "path" ? "none" : drawn ? style.fill : style.backgroundColor;
      if (paint !== "none" && rgb(paint)[3] === 255 && Number(style.opacity) === 1) return rgb(paint);
    }
    return rgb(getComputedStyle(document.body).backgroundColor);
  };
  const poor = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  let seen = 0;
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    const said = walker.currentNode.data.trim();
    if (!said || element.closest("script, title, noscript, option, .ghost, [hidden]")) continue;
    const range = document.createRange(); range.selectNodeContents(walker.currentNode);
    element.scrollIntoView({block: "center"});
    const box = range.getBoundingClientRect();
    if (!box.width || getComputedStyle(element).visibility === "hidden") continue;
    seen++;
    const style = getComputedStyle(element);
    const colour = rgb(element instanceof SVGElement ? style.fill : style.color);
    const [a, b] = [luminance(colour), luminance(behind(element, box.x + box.width / 2, box.y + box.height / 2))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) poor.push([ratio, element.className.baseVal ?? element.className, said.slice(0, 30)]);
  }
  return {poor, seen};
})()"""

VIEWS = [
    "#a=ring&ranks=8&at=2",
    "#a=hierarchical&b=star&ranks=8&hosts=4x2&at=1",
    "#collective=broadcast&a=star&b=tree&ranks=5&root=2&at=1",
    "#collective=all_to_all&ranks=16",
]


@pytest.mark.parametrize("address", VIEWS)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_from_what_is_behind_it(address, scheme, opened):
    tab = opened(address, prefers_color_scheme=scheme)
    tab.value("document.querySelector('.player').style.position = 'static'")  # it would cover what is measured
    found = tab.value(CONTRAST)
    assert found["seen"] > 30 and found["poor"] == []


@pytest.mark.parametrize("address", VIEWS)
def test_a_telephone_is_wide_enough(address, opened):
    tab = opened(address, width=375, height=812)
    assert tab.value("document.documentElement.scrollWidth") <= 375
    outside = """[...document.querySelectorAll('.card')].map((e) => e.getBoundingClientRect())
      .filter((b) => b.left < 0 || b.right > 375).length"""
    assert tab.value(outside) == 0


def test_cards_do_not_cover_each_other(opened):
    covered = """[...document.querySelectorAll('#stage-a .card-face')].map((e) => e.getBoundingClientRect())
      .flatMap((a, i, all) => all.slice(i + 1).filter(
        (b) => a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom)).length"""
    tab = opened()
    for world, hosts in ((2, ""), (7, ""), (16, ""), (7, "4,3"), (16, "4x4"), (16, "16x1")):
        for what in ("a=ring&b=", "a=butterfly&b=ring", "collective=all_to_all"):
            settled(tab, lambda to=f"#{what}&ranks={world}&hosts={hosts}": tab.value(f"location.hash = '{to}'"))
            assert tab.value("document.querySelectorAll('#stage-a .card-face').length") == world
            assert tab.value(covered) == 0, (world, hosts, what)


def test_the_page_is_small(file):
    assert file.stat().st_size <= 1 << 20
