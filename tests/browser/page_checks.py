"""What every view must do for those who read, hear or wait for it: scripts for a page."""

from __future__ import annotations

from importlib.resources import files

from playwright.sync_api import Page

AXE = files("axe_playwright_python").joinpath("axe.min.js").read_text(encoding="utf-8")

# Controls and landmarks without a name.
UNNAMED = """() => [...document.querySelectorAll('button, input, select, a, nav, section, [role]')]
  .filter((e) => !(e.labels?.length || e.ariaLabel || e.hasAttribute('aria-labelledby')
    || e.role === 'status' || e.textContent.trim()))
  .map((e) => e.outerHTML)"""

# Ids that are there twice.
TWICE = (
    """() => [...document.querySelectorAll('[id]')].map((e) => e.id).filter((id, at, all) => all.indexOf(id) !== at)"""
)

# Texts below 4.5 to 1 (WCAG AA). Mixed colours (color-mix, color(srgb ...)) are drawn on a canvas to be read.
FAINT = """() => {
  const canvas = document.createElement('canvas').getContext('2d', { willReadFrequently: true });
  const rgb = (colour, under) => {
    canvas.fillStyle = under; canvas.fillRect(0, 0, 1, 1);
    canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3);
  };
  const linear = (value) => (value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4);
  const light = (values) => values.reduce((sum, v, at) => sum + linear(v / 255) * [0.2126, 0.7152, 0.0722][at], 0);
  const behind = (element) => {
    const chain = [];
    for (let e = element; e; e = e.parentElement) chain.unshift(getComputedStyle(e).backgroundColor);
    return chain.reduce((under, colour) => `rgb(${rgb(colour, under)})`, 'rgb(255,255,255)');
  };
  const texts = [...document.querySelectorAll('main *')].filter(
    (e) => [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim())
      && e.checkVisibility() && !e.matches(':disabled'));
  return texts.map((e) => {
    const under = behind(e);
    const [a, b] = [light(rgb(getComputedStyle(e).color, under)), light(rgb(under, under))].sort((x, y) => y - x);
    return { text: e.textContent.trim().slice(0, 30), ratio: (a + 0.05) / (b + 0.05) };
  }).filter((found) => found.ratio < 4.5);
}"""


RUN_AXE = """async () => {
  const { violations } = await axe.run(document, { resultTypes: ['violations'] });
  return violations.map(({ id, nodes }) => `${id}: ${nodes.slice(0, 3).map((n) => n.html.slice(0, 150)).join(' | ')}`);
}"""


def violations(page: Page) -> list[str]:
    """What axe-core says is wrong with the page as it is."""
    if not page.evaluate("'axe' in window"):
        page.evaluate(AXE)
    found: list[str] = page.evaluate(RUN_AXE)
    return found


def slowest_frame(page: Page, seconds: float) -> float:
    """Milliseconds between two paints of the page, at most, during a time of watching."""
    milliseconds: float = page.evaluate(
        """async (duration) => {
          let slowest = 0, last = performance.now();
          const end = last + duration;
          while (last < end) {
            await new Promise(requestAnimationFrame);
            slowest = Math.max(slowest, performance.now() - last);
            last = performance.now();
          }
          return slowest;
        }""",
        seconds * 1000,
    )
    return milliseconds
