// The websocket of a session, as legato_client/web/playground/routes.py describes it.

const MOST_UNSENT = 64 * 1024; // bytes that may wait in the browser before frames are left out

export class Live {
  /** `told` gets each message; `ended` gets the failure that ended the session, null for a good end. */
  constructor(opening, { told, ended }) {
    const scheme = location.protocol === "https:" ? "wss:" : "ws:";
    this.socket = new WebSocket(`${scheme}//${location.host}/playground/session`);
    this.socket.binaryType = "arraybuffer";
    this.isOpen = false;
    this.sequence = 0;
    this.captured = new Map(); // of each frame without an outcome, in milliseconds since the Unix epoch
    this.ended = ended;
    this.socket.addEventListener("open", () => this.socket.send(JSON.stringify(opening)));
    this.socket.addEventListener("message", (event) => this.take(JSON.parse(event.data), told));
    this.socket.addEventListener("close", () => this.end({
      code: "UNAVAILABLE", message: "this page's own process does not answer", hint: "Is `legato playground` still running?",
    }));
  }

  /** Whether frames still wait to leave the browser. */
  get isBusy() {
    return this.socket.bufferedAmount > MOST_UNSENT;
  }

  /** Send a file's bytes; `captured` is in milliseconds since the Unix epoch. Returns whether it was sent. */
  send(captured, image) {
    if (!this.isOpen || this.socket.readyState !== WebSocket.OPEN) return false;
    this.sequence += 1;
    this.captured.set(this.sequence, captured);
    const message = new Uint8Array(12 + image.byteLength), head = new DataView(message.buffer);
    head.setFloat64(0, captured, true);
    head.setUint32(8, this.sequence, true);
    message.set(image, 12);
    this.socket.send(message);
    return true;
  }

  /** Send no more frames; those under way still get their outcome, then `ended` is called. */
  finish() {
    if (this.isOpen && this.socket.readyState === WebSocket.OPEN) this.socket.send(JSON.stringify({ finish: true }));
    else this.end(null);
    this.isOpen = false;
  }

  take(message, told) {
    if (message.type === "opened") this.isOpen = true;
    if (message.type === "failed") return this.end(message);
    const captured = this.captured.get(message.sequence);
    if (message.type === "dropped" || message.type === "left_out" || message.last) this.captured.delete(message.sequence);
    told({ ...message, captured });
    if (message.type === "ended") this.end(null);
  }

  end(failure) {
    const { ended } = this;
    this.ended = null;
    this.isOpen = false;
    this.socket.close();
    ended?.(failure, this.captured.size);
  }
}
