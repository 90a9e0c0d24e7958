// What is drawn over an image. Shapes are SVG in fractions of the image, so a resize needs no
// redrawing; points and labels are elements beside them, which keep their size.

import { el, svg } from "./dom.js";

const percent = (fraction) => `${(fraction * 100).toFixed(3)}%`;

/** Fills a stage, the positioned element that holds the image. */
export class Overlay {
  constructor(stage) {
    this.root = el("div", { className: "overlay", ariaHidden: "true" });
    this.shapes = svg("svg", { viewBox: "0 0 1 1", preserveAspectRatio: "none" });
    this.root.append(this.shapes);
    stage.append(this.root);
  }

  /** A layer in one of the colours 0 to 5. */
  layer(colour) {
    const shapes = svg("g", { class: `ink-${colour % 6}` });
    const labels = el("div", { className: `ink-${colour % 6}` });
    this.shapes.append(shapes);
    this.root.append(labels);
    return new Layer(shapes, labels);
  }
}

class Layer {
  constructor(shapes, labels) {
    this.shapes = shapes;
    this.labels = labels;
    this.outlines = new Map();
    this.moving = new Map();
  }

  /** A box; a `faint` one has no label. */
  box(box, label, { faint = false } = {}) {
    this.shapes.append(rectangle(box, faint ? "box faint" : "box"));
    if (!faint) this.labelBox(box, label);
  }

  /** Move the boxes to where these are: [[key, box, label, opacity]]. Others that were moved are removed. */
  move(boxes) {
    const keys = new Set(boxes.map(([key]) => key));
    for (const [key, { shape, label }] of this.moving) {
      if (keys.has(key)) continue;
      shape.remove();
      label.remove();
      this.moving.delete(key);
    }
    for (const [key, box, text, opacity] of boxes) {
      let each = this.moving.get(key);
      if (!each) {
        each = { shape: rectangle(box, "box now"), label: this.labelBox(box, text) };
        this.shapes.append(each.shape);
        this.moving.set(key, each);
      }
      for (const [name, value] of Object.entries(sides(box))) each.shape.setAttribute(name, value);
      each.shape.style.opacity = opacity;
      if (each.label.textContent !== text) each.label.textContent = text;
      this.placeLabel(each.label, box);
    }
  }

  point(point, label) {
    const dot = el("span", { className: "point" });
    dot.style.left = percent(point.x);
    dot.style.top = percent(point.y);
    this.labels.append(dot);
    if (label) this.label(point.y, label, point.x > 0.75 ? "before" : "beside").style.left = percent(point.x);
  }

  /** Outline `index` begins with its box; then its path grows. */
  outline(index, { box, path_delta: delta }, label) {
    if (box) this.outlines.set(index, this.begin(box, label));
    const outline = this.outlines.get(index);
    if (!outline || !delta) return;
    outline.path += delta;
    outline.shape.setAttribute("d", outline.path);
  }

  begin(box, label) {
    const across = box.x_max - box.x_min, down = box.y_max - box.y_min;
    const shape = svg("path", {
      class: "outline",
      transform: `translate(${box.x_min} ${box.y_min}) scale(${across} ${down})`,
    });
    const frame = rectangle(box, "frame");
    this.shapes.append(frame, shape);
    return { shape, path: "", label: this.labelBox(box, label) };
  }

  /** A finished outline in place of its pieces. */
  whole(index, finished) {
    if (!this.outlines.has(index)) this.outline(index, { box: finished.box }, labelOf(finished));
    const outline = this.outlines.get(index);
    outline.path = finished.path;
    outline.label.textContent = labelOf(finished);
    outline.shape.setAttribute("d", finished.path);
  }

  labelBox(box, text) {
    const label = this.label(box.y_min, text, "above");
    this.placeLabel(label, box);
    return label;
  }

  /** At the left edge of a box, at its right edge where the image ends soon; within the image. */
  placeLabel(label, box) {
    const within = (value) => percent(Math.min(1, Math.max(0, value)));
    const isRight = box.x_min > 0.5;
    label.className = `label ${box.y_min < 0.06 ? "inside" : "above"}`;
    label.style.top = within(box.y_min);
    label.style.right = isRight ? within(1 - box.x_max) : "";
    label.style.left = isRight ? "" : within(box.x_min);
  }

  label(y, text, place) {
    const label = el("span", { className: `label ${place}`, textContent: text });
    label.style.top = percent(y);
    this.labels.append(label);
    return label;
  }

  clear() {
    this.shapes.replaceChildren();
    this.labels.replaceChildren();
    this.outlines.clear();
    this.moving.clear();
  }

  remove() {
    this.shapes.remove();
    this.labels.remove();
  }
}

const sides = (box) => ({
  x: box.x_min, y: box.y_min, width: box.x_max - box.x_min, height: box.y_max - box.y_min,
});

const rectangle = (box, kind) => svg("rect", { class: kind, ...sides(box) });

/** A label with the track in a session, and the confidence where the model gives one. */
export function labelOf({ label, confidence, track_id: track }) {
  const sure = confidence === null || confidence === undefined ? "" : ` ${(confidence * 100).toFixed(0)}%`;
  return `${label}${track ? ` #${track}` : ""}${sure}`;
}
