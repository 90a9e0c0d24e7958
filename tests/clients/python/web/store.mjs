// node store.mjs STATIC MESSAGE: checks timeline-store.js with a message of the stream.

import assert from "node:assert";

const { NAMES, Store } = await import(`${process.argv[2]}/timeline-store.js`);
const message = JSON.parse(process.argv[3]);

const spansOf = (store, number) => {
  const found = [];
  store.spans(number, (name, start, length) => found.push([NAMES[name], start, length]));
  return found;
};

{ // a message as the server sends it
  const store = new Store(16);
  assert.equal(store.add(message), "6 launches lost: this page read too slowly");
  assert.deepEqual([store.size, store.lost, store.depth, store.latest], [2, 6, 2, 2530]);
  assert.deepEqual(spansOf(store, 0),
    [["held", 1050, 1000], ["idle", 1900.5, 20], ["forward", 1200.5, 700], ["plan", 1000, 50]]);
  const { launch, slot, rows, riding, zombies, tokens, kind } = store.read(0);
  assert.deepEqual([launch, slot, rows, riding, zombies, tokens, kind], [7, 1, 3, 1, 2, 4, "decode"]);
  assert.deepEqual([store.after(0), store.after(2050), store.after(2530)], [0, 1, 2]);
  assert.equal(store.steps.predicted_gain, 0.25);
}

const decode = (number) => ({
  engine: 0, started: 1, lost: 0, depth: 2, steps: null,
  launches: [[number, "decode", number % 2, 1, 0, 0, 1, 1000 * number, [8, 10, 5, 8, 40, 6, 4, 990, 10]]],
});

{ // far more than it keeps
  const store = new Store(16);
  for (let number = 0; number < 100; number++) assert.equal(store.add(decode(number)), "");
  assert.deepEqual([store.size, store.first, store.next], [16, 84, 100]);
  assert.equal(store.start.length, 16);
  assert.deepEqual([store.read(84).launch, store.read(99).launch], [84, 99]);
  assert.deepEqual(spansOf(store, 99).filter(([name]) => name === "idle"), [["idle", 99040, 6], ["idle", 99010, 5]]);
  for (let number = 84; number < 100; number++) assert.equal(store.after(1000 * number + 999), number);
}

{ // another engine and another depth are marked, and marks are bounded
  const store = new Store(16);
  store.add(decode(0));
  assert.equal(store.add({ ...decode(1), depth: 1 }), "depth 1");
  assert.equal(store.add({ ...decode(0), started: 2 }), "depth 2");
  assert.deepEqual(store.marks.map((mark) => mark.text), ["depth 1", "the engine was started again", "depth 2"]);
  for (let number = 0; number < 500; number++) store.add({ ...decode(number), lost: 1 });
  assert.equal(store.lost, 500);
  assert.ok(store.marks.length <= 64);
}
