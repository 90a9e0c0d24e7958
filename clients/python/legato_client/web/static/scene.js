// Drawings that move before a sky and a meadow: a clip of what legato-tiny knows. Everything is a
// function of the time, so two plays are the same.

const THINGS = [
  { noun: "balloon", lane: 0, period: 11.3, phase: 0.4 },
  { noun: "bus", lane: 1, period: 9.7, phase: 2.1 },
  { noun: "dog", lane: 2, period: 8.3, phase: 4.0 },
];
export const NOUNS = THINGS.map((thing) => thing.noun);

/** A source of frames, as in frames.js. */
export class Scene {
  constructor() {
    this.width = 640;
    this.height = 480;
    this.started = performance.now();
    this.drawings = new Map(NOUNS.map((noun) => {
      const image = new Image();
      image.src = `/static/drawings/${noun}.webp`;
      return [noun, image];
    }));
    this.ready = Promise.allSettled([...this.drawings.values()].map((image) => image.decode()));
  }

  draw(context, width, height) {
    const t = (performance.now() - this.started) / 1000;
    ground(context, width, height);
    for (const thing of THINGS) {
      const image = this.drawings.get(thing.noun);
      if (image.complete && image.naturalWidth) {
        context.drawImage(image, ...place(thing, t, width, height, image));
      }
    }
  }

  close() {}
}

/** Left, top, width and height of a drawing at time t; lanes keep the things apart. */
function place({ lane, period, phase }, t, width, height, image) {
  const band = height / THINGS.length;
  const swing = (seconds) => Math.sin((2 * Math.PI * t) / seconds + phase);
  const side = band * (0.78 + 0.08 * swing(6.1));
  const scale = side / Math.max(image.naturalWidth, image.naturalHeight);
  const across = image.naturalWidth * scale, down = image.naturalHeight * scale;
  const x = width / 2 + (width / 2 - side * 0.6) * swing(period);
  const y = band * (lane + 0.5) + band * 0.04 * swing(4.7);
  return [x - across / 2, y - down / 2, across, down];
}

function ground(context, width, height) {
  const horizon = height * 0.62;
  const sky = context.createLinearGradient(0, 0, 0, horizon);
  sky.addColorStop(0, "rgb(126 190 240)");
  sky.addColorStop(1, "rgb(232 244 252)");
  context.fillStyle = sky;
  context.fillRect(0, 0, width, horizon);
  const meadow = context.createLinearGradient(0, horizon, 0, height);
  meadow.addColorStop(0, "rgb(150 205 110)");
  meadow.addColorStop(1, "rgb(94 160 76)");
  context.fillStyle = meadow;
  context.fillRect(0, horizon, width, height - horizon);
}
