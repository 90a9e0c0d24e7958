// The websocket of a session, as legato_client/web/playground/live.py describes it.

const MOST_UNSENT = 64 * 1024; // bytes that may wait in the browser before frames are left out
const REMEMBERED = 256; // frames whose time of capture is kept

export class Live {
  /** `told` gets each message, `failed` the failure that ended the session. */
  constructor(opening, { told, failed }) {
    const scheme = location.protocol === "https:" ? "wss:" : "ws:";
    this.socket = new WebSocket(`${scheme}//${location.host}/playground/session`);
    this.socket.binaryType = "arraybuffer";
    this.isOpen = false;
    this.sequence = 0;
    this.captured = new Map();
    this.failed = failed;
    this.socket.addEventListener("open", () => this.socket.send(JSON.stringify(opening)));
    this.socket.addEventListener("message", (event) => this.take(JSON.parse(event.data), told));
    this.socket.addEventListener("close", () => this.fail({
      code: "UNAVAILABLE", message: "the session's connection ended", hint: "Start it again.",
    }));
  }

  /** Whether frames still wait to leave the browser. */
  get isBusy() {
    return this.socket.bufferedAmount > MOST_UNSENT;
  }

  /** `captured` is in milliseconds since the Unix epoch. */
  send(captured, picture) {
    if (this.socket.readyState !== WebSocket.OPEN) return;
    this.sequence += 1;
    this.captured.set(this.sequence, captured);
    this.captured.delete(this.sequence - REMEMBERED);
    const message = new Uint8Array(12 + picture.byteLength), head = new DataView(message.buffer);
    head.setFloat64(0, captured, true);
    head.setUint32(8, this.sequence, true);
    message.set(new Uint8Array(picture), 12);
    this.socket.send(message);
  }

  close() {
    this.failed = null;
    this.socket.close();
  }

  take(message, told) {
    if (message.type === "opened") this.isOpen = true;
    if (message.type === "failed") {
      this.fail(message);
      return;
    }
    const captured = this.captured.get(message.sequence);
    const age = captured === undefined ? NaN : performance.timeOrigin + performance.now() - captured;
    told({ ...message, age });
  }

  fail(failure) {
    const failed = this.failed;
    this.failed = null;
    failed?.(failure);
  }
}
