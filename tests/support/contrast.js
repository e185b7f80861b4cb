// Texts of a page whose contrast with what lies behind them is below 4.5, as WCAG 2 computes it.
() => {
  const numbers = (color) => color.match(/[\d.]+/g).map(Number);
  const alpha = (color) => numbers(color)[3] ?? 1;
  const light = (color) => numbers(color).slice(0, 3).map((c) => c / 255)
    .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const seen = { count: 0, low: [] };
  const check = (where, color, text) => {
    let behind = where;
    while (behind && alpha(getComputedStyle(behind).backgroundColor) === 0) behind = behind.parentElement;
    const below = getComputedStyle(behind ?? document.body).backgroundColor;
    const [low, high] = [light(color), light(below)].sort((one, other) => one - other);
    const ratio = (high + 0.05) / (low + 0.05);
    seen.count += 1;
    if (ratio < 4.5 || alpha(color) < 1 || alpha(below) < 1) seen.low.push(`${text}: ${color} on ${below}`);
  };
  for (const here of document.body.querySelectorAll("*")) {
    if (["SCRIPT", "STYLE"].includes(here.tagName) || !here.checkVisibility()) continue;
    let opacity = 1;
    for (let up = here; up; up = up.parentElement) opacity *= getComputedStyle(up).opacity;
    const text = [...here.childNodes].filter((node) => node.nodeType === 3).map((node) => node.data).join("").trim();
    if (text && opacity < 1) seen.low.push(`${text}: opacity ${opacity}`);
    if (text || here.value) check(here, getComputedStyle(here).color, text || here.value);
    if (here.placeholder) check(here, getComputedStyle(here, "::placeholder").color, here.placeholder);
  }
  return seen;
}
