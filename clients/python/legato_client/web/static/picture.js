// The image that is asked about: where it comes from, and its id on the server.

import { Failure, told, upload } from "./api.js";
import { byId, el, failureView } from "./dom.js";
import { Overlay } from "./overlay.js";
import { openCamera } from "./frames.js";

/** Images that come with the page, and what is worth asking about each; the first is shown at load. */
export const SAMPLES = [
  { file: "scene.jpg", title: "garden", tasks: [["detect", "dog"], ["query", "How many apples are there?"]] },
  { file: "fruit.jpg", title: "fruit", tasks: [["detect", "strawberry"], ["query", "How many strawberries are there?"]] },
  { file: "street.jpg", title: "street", tasks: [["detect", "bus"], ["segment", "traffic light"], ["caption", "normal"]] },
];

/** Events: `picture` when another image is shown, `place` for a click or a drag on it. */
export class PictureSource extends EventTarget {
  constructor(server) {
    super();
    this.server = server;
    this.stage = byId("stage");
    this.state = byId("picture-state");
    this.name = "";
    this.blob = null;
    this.held = null; // a promise of the server's id
    this.overlay = null;
    this.listen();
  }

  /** The id under which the server holds the image; `again` sends it once more. */
  imageId(again = false) {
    if (!this.blob) return Promise.resolve(null);
    if (again || !this.held) this.send();
    return this.held.then((held) => held.image_id);
  }

  /** Show an image, tell the page, and send it unless that can wait until it is asked about. */
  async show(blob, name, canWait = false) {
    if (!blob.type.startsWith("image/")) {
      this.complain({ code: "PAGE", message: `${name} is not an image`, hint: "Choose a JPEG, PNG or WebP file." });
      return;
    }
    const image = el("img", { alt: `The image that is asked about: ${name}`, draggable: false });
    const url = URL.createObjectURL(blob);
    image.src = url;
    try {
      await image.decode();
    } catch {
      URL.revokeObjectURL(url);
      this.complain({ code: "PAGE", message: `this browser cannot show ${name}`, hint: "Choose a JPEG, PNG or WebP file." });
      return;
    }
    if (this.url) URL.revokeObjectURL(this.url);
    Object.assign(this, { url, blob, name, held: null });
    this.place(image);
    if (this.server.facts && !canWait) this.send();
    else this.state.textContent = name;
    this.dispatchEvent(new Event("picture"));
  }

  place(image) {
    const frame = el("div", { className: "frame" }, image);
    this.overlay = new Overlay(frame);
    this.stage.replaceChildren(frame);
    this.watchPlaces(frame);
  }

  send() {
    const started = performance.now(), blob = this.blob;
    const limit = this.server.facts?.max_picture_bytes ?? Infinity;
    this.state.textContent = `Uploading ${this.name}`;
    this.held = blob.size > limit
      ? Promise.reject(new Failure({
        code: "PAGE", message: `the image has ${blob.size} bytes, and the limit is ${limit}`,
        hint: "Choose a smaller image.",
      }))
      : upload(blob);
    this.held.then(
      ({ width, height }) => {
        if (blob !== this.blob) return;
        const took = Math.round(performance.now() - started);
        this.state.textContent = `${this.name}, ${width} × ${height}, uploaded in ${took} ms`;
      },
      (error) => {
        if (blob === this.blob) this.complain(told(error));
      },
    );
  }

  complain(failure) {
    this.state.replaceChildren(failureView(failure));
  }

  // ---------------------------------------------------------------- where images come from

  listen() {
    byId("samples").append(...SAMPLES.map((sample) => this.sampleButton(sample)));
    byId("file").addEventListener("change", (event) => this.take(event.target.files));
    document.addEventListener("paste", (event) => this.take(event.clipboardData.files));
    document.addEventListener("dragover", (event) => {
      event.preventDefault();
      this.stage.classList.add("over");
    });
    document.addEventListener("dragleave", () => this.stage.classList.remove("over"));
    document.addEventListener("drop", (event) => {
      event.preventDefault();
      this.stage.classList.remove("over");
      this.take(event.dataTransfer.files);
    });
    byId("camera").addEventListener("click", () => this.openCamera());
  }

  take(files) {
    if (files?.length) this.show(files[0], files[0].name || "image.png");
  }

  sampleButton(sample) {
    const image = el("img", { src: `/static/samples/${sample.file}`, alt: "", width: 48, height: 36 });
    const button = el("button", { type: "button", className: "sample", ariaLabel: `Sample: ${sample.title}`, title: sample.title }, image, sample.title);
    button.addEventListener("click", async () => {
      await this.showSample(sample);
      this.dispatchEvent(new CustomEvent("sample", { detail: sample }));
    });
    return button;
  }

  async showSample(sample, canWait = false) {
    const response = await fetch(`/static/samples/${sample.file}`);
    await this.show(await response.blob(), sample.file, canWait);
  }

  async openCamera() {
    const shoot = byId("shoot");
    let camera;
    try {
      camera = await openCamera();
    } catch (error) {
      this.complain({ code: "CAMERA", message: error.message, hint: "Allow it in the browser; it works on localhost or over HTTPS only." });
      return;
    }
    this.stage.replaceChildren(camera.video);
    shoot.hidden = false;
    shoot.focus();
    shoot.onclick = async () => {
      const blob = await camera.take();
      camera.close();
      shoot.hidden = true;
      byId("camera").focus();
      this.show(blob, "webcam.jpg");
    };
  }

  // ---------------------------------------------------------------- places

  watchPlaces(frame) {
    const at = (event) => {
      const area = frame.getBoundingClientRect();
      const within = (value) => Math.min(1, Math.max(0, value));
      return [within((event.clientX - area.left) / area.width), within((event.clientY - area.top) / area.height)];
    };
    let start = null;
    frame.addEventListener("pointerdown", (event) => {
      start = at(event);
    });
    frame.addEventListener("pointerup", (event) => {
      if (!start) return;
      const end = at(event), [x, y] = start;
      start = null;
      const isDrag = Math.hypot(end[0] - x, end[1] - y) > 0.02;
      const corners = [Math.min(x, end[0]), Math.min(y, end[1]), Math.max(x, end[0]), Math.max(y, end[1])];
      const numbers = (isDrag ? corners : [x, y]).map((value) => value.toFixed(3));
      this.dispatchEvent(new CustomEvent("place", { detail: numbers.join(" ") }));
    });
  }
}
