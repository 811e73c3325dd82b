// Line plots over time, as SVG.

const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 440, HEIGHT = 190, LEFT = 44, RIGHT = 8, TOP = 10, BOTTOM = 24;

export function element(name, attributes = {}, ...children) {
  const made = ["svg", "path", "line", "text", "circle", "g", "title"].includes(name)
    ? document.createElementNS(SVG, name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

export function short(value) {
  if (value === null || value === undefined) return "–";
  if (value >= 1000) return `${(value / 1000).toPrecision(3)}k`;
  return value >= 100 ? value.toFixed(0) : String(Number(value.toFixed(value >= 10 ? 1 : 2)));
}

// The next of 1, 2, 5, 10, ... above a value, so that the scale stays still.
function ceiling(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((each) => each * power).find((each) => each >= value);
}

// series: [{name, values}], values beside times (seconds), null where there is none.
export function plot(title, unit, times, series, seconds) {
  const end = times.at(-1), begin = end - seconds;
  const top = ceiling(Math.max(...series.flatMap((each) => each.values.map((value) => value ?? 0))));
  const x = (time) => LEFT + (WIDTH - LEFT - RIGHT) * (time - begin) / seconds;
  const y = (value) => HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * value / top;
  const latest = series.map((each) => `${each.name} ${short(each.values.at(-1))} ${unit}`).join(", ");
  const svg = element("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": `${title}: ${latest}` });
  for (const share of [0, 0.5, 1]) {
    const at = y(share * top);
    svg.append(element("line", { class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: at, y2: at }));
    svg.append(element("text", { x: LEFT - 6, y: at + 4, "text-anchor": "end" }, short(share * top)));
  }
  for (const minutes of [5, 4, 3, 2, 1, 0]) {
    const at = x(end - 60 * minutes);
    if (at < LEFT - 1) continue;
    const anchor = minutes === 0 ? "end" : "middle";
    svg.append(element("text", { x: at, y: HEIGHT - 6, "text-anchor": anchor }, minutes ? `−${minutes} min` : "now"));
  }
  series.forEach((each, index) => {
    let path = "", open = false, last = null;
    times.forEach((time, at) => {
      const value = each.values[at];
      if (value === null || time < begin) { open = false; return; }
      path += `${open ? "L" : "M"}${x(time).toFixed(1)} ${y(value).toFixed(1)}`;
      open = true;
      last = [x(time), y(value)];
    });
    svg.append(element("path", { class: `line s${index}`, d: path }));
    if (last) svg.append(element("circle", { class: `dot s${index}`, cx: last[0], cy: last[1], r: 3 }));
  });
  const caption = element("figcaption", {}, `${title} `);
  series.forEach((each, index) => {
    caption.append(element("span", { class: "named" }, element("span", { class: `key s${index}` }),
      `${each.name} ${short(each.values.at(-1))} ${unit}`), " ");
  });
  return element("figure", {}, caption, svg);
}
