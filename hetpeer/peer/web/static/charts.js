// Curves, drawn by uPlot (vendor/): one or two lines over a common x.

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

export class Chart {
  /** `lines`: [label, colour variable] each; `time`: x is seconds since 1970. */
  constructor(place, lines, { time = false } = {}) {
    this.place = place;
    this.lines = lines;
    this.time = time;
    this.plot = null;
    new ResizeObserver(() => this.plot?.setSize(this.size())).observe(place);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.redraw());
  }

  size() {
    return { width: Math.max(this.place.clientWidth, 120), height: 200 };
  }

  /** `curves`: for each line its points, [x, y] each, in the order of x. */
  show(curves) {
    this.data = joined(curves);
    this.place.dataset.points = this.data[0].length;
    if (this.plot) this.plot.setData(this.data);
    else if (this.data[0].length) this.redraw();
  }

  redraw() {
    if (!this.data) return;
    this.plot?.destroy();
    const axis = { stroke: css("--faint"), grid: { stroke: css("--line"), width: 1 }, ticks: { stroke: css("--line"), width: 1 } };
    const series = this.lines.map(([label, colour]) => ({ label, stroke: css(colour), width: 1.5, spanGaps: true, points: { show: false } }));
    this.plot = new uPlot({
      ...this.size(),
      scales: { x: { time: this.time } },
      axes: [axis, { ...axis, size: 56 }],
      series: [{ label: this.time ? "time" : "step" }, ...series],
    }, this.data, this.place);
  }
}

/** Curves over one common x, as uPlot wants them: [xs, ys, ys…], null where a curve has no point. */
export function joined(curves) {
  const xs = [...new Set(curves.flatMap((points) => points.map(([x]) => x)))].sort((a, b) => a - b);
  const at = new Map(xs.map((x, place) => [x, place]));
  const columns = curves.map((points) => {
    const ys = new Array(xs.length).fill(null);
    for (const [x, y] of points) ys[at.get(x)] = y;
    return ys;
  });
  return [xs, ...columns];
}
