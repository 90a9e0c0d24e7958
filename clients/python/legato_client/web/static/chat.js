// The tab "Chat": a conversation about the image, about several where the model takes them, or without one. The server
// keeps nothing of it.

import { generate, told, upload } from "./api.js";
import { showCode } from "./code.js";
import { byId, el, failureView, ms } from "./dom.js";
import { optionsOf, samplingOf } from "./tasks.js";

const ROLES = { user: "CHAT_ROLE_USER", assistant: "CHAT_ROLE_ASSISTANT", system: "CHAT_ROLE_SYSTEM" };

export function startChat(picture) {
  new Chat(picture);
}

class Chat {
  constructor(picture) {
    this.picture = picture;
    this.messages = [];
    this.abort = null;
    this.build();
    picture.addEventListener("picture", () => this.showPicture());
    this.showPicture();
  }

  build() {
    this.thumbnail = el("div", { className: "thumbnail" });
    this.about = el("input", { type: "checkbox", checked: true });
    this.system = el("input", { autocomplete: "off", placeholder: "none" });
    this.log = el("div", { className: "log", role: "log", ariaLabel: "Conversation", tabIndex: 0 });
    this.input = el("textarea", { rows: 2, ariaLabel: "Message" });
    this.send = el("button", { type: "submit", className: "primary" }, "Send");
    this.stop = el("button", { type: "button", disabled: true }, "Stop");
    this.again = el("button", { type: "button" }, "New chat");
    this.code = el("button", { type: "button", disabled: true }, "Code");
    const form = el("form", { ariaLabel: "Say something" }, this.input,
      el("div", { className: "actions" }, this.send, this.stop, this.code, this.again));
    byId("panel-chat").append(el("div", { className: "card chat" },
      el("h2", {}, "Conversation"),
      el("div", { className: "about" }, this.thumbnail,
        el("label", { className: "check" }, this.about, "Include the image of the tab Ask"),
        el("label", { className: "system" }, "System prompt", this.system)),
      this.log, form));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.say();
    });
    this.input.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.say();
    });
    this.stop.addEventListener("click", () => this.abort?.abort());
    this.again.addEventListener("click", () => this.clear());
    this.code.addEventListener("click", () =>
      showCode(this.question(this.asked, this.codeImages(this.asked))));
  }

  get aboutPicture() {
    return this.about.checked && Boolean(this.picture.blob);
  }

  /** How many images a conversation may show. */
  get mostImages() {
    const models = this.picture.server.facts?.models ?? [], chosen = byId("model").value;
    return (models.find(({ name }) => name === chosen) ?? models[0])?.max_images ?? 1;
  }

  /** The image that the next message shows: one that no message of the conversation shows last. */
  newImage() {
    if (!this.aboutPicture || this.mostImages < 2) return null;
    const { blob, name } = this.picture, last = shownIn(this.messages).at(-1);
    if (last?.blob === blob) return null;
    return { blob, name, url: URL.createObjectURL(blob), id: this.picture.imageId() };
  }

  showPicture() {
    const has = Boolean(this.picture.url);
    this.about.disabled = !has;
    this.input.placeholder = has ? "Ask about the image" : "Ask a question";
    if (!this.messages.length && !this.abort) this.showExamples();
    this.thumbnail.replaceChildren(has
      ? el("img", { src: this.picture.url, alt: `The image: ${this.picture.name}` })
      : el("span", { className: "small" }, "no image"));
  }

  clear() {
    this.abort?.abort();
    this.log.querySelectorAll("img").forEach((image) => URL.revokeObjectURL(image.src));
    this.messages = [];
    this.code.disabled = true;
    this.showExamples();
    this.input.focus();
  }

  /** Something to say, in an empty conversation. */
  showExamples() {
    const says = (text) => {
      const button = el("button", { type: "button", className: "small" }, text);
      button.addEventListener("click", () => {
        this.input.value = text;
        this.say();
      });
      return button;
    };
    const examples = this.aboutPicture ? ["What colour is the balloon?", "How many apples are there?"] : ["Why is the sky blue?"];
    this.log.replaceChildren(el("div", { className: "empty" },
      el("p", { className: "help" }, "Ask a question below, or start with one of these. The server keeps nothing of a conversation."),
      el("p", { className: "actions" }, ...examples.map(says))));
  }

  /** The request of a conversation with its images: members of the query, and of the request. */
  question(messages, { ofQuery, ofRequest }) {
    const system = this.system.value.trim();
    const all = [...(system ? [{ role: "system", text: system }] : []), ...messages];
    const said = all.map(({ role, text, image }) => ({ role: ROLES[role], parts: [...(image ? [{ image: {} }] : []), { text }] }));
    const sampling = samplingOf();
    const task = { query: { messages: said, ...ofQuery }, ...(Object.keys(sampling).length ? { sampling } : {}) };
    return { ...ofRequest, task, options: optionsOf() };
  }

  /** Images as files, for programs. */
  codeImages(messages) {
    const shown = shownIn(messages);
    if (shown.length) return { ofRequest: { pictures: shown.map(({ name }) => name) } };
    return this.aboutPicture ? { ofRequest: { picture: this.picture.name } } : {};
  }

  /** Images by the ids under which the server holds them; `again` sends them once more. */
  async heldImages(messages, again = false) {
    const shown = shownIn(messages);
    if (!shown.length) {
      const id = this.aboutPicture ? await this.picture.imageId(again) : null;
      return id ? { ofRequest: { image_id: id } } : {};
    }
    for (const image of again ? shown : []) image.id = upload(image.blob).then((held) => held.image_id);
    const ids = await Promise.all(shown.map(({ id }) => id));
    return { ofQuery: { images: ids.map((id) => ({ image: { image_id: id } })) } };
  }

  async say() {
    const text = this.input.value.trim();
    if (!text || this.abort) return;
    this.input.value = "";
    if (!this.messages.length) this.log.replaceChildren();
    const image = this.newImage();
    this.asked = [...this.messages, { role: "user", text, image }];
    this.show("user", text, image);
    const answer = this.show("assistant", "");
    this.toggle(true);
    const abort = this.abort = new AbortController();
    try {
      const said = await this.listen(answer, abort.signal);
      if (abort === this.abort) this.messages = [...this.asked, { role: "assistant", text: said }];
    } catch (error) {
      if (error.name === "AbortError") answer.append(el("span", { className: "small" }, " (stopped)"));
      else answer.append(failureView(told(error)));
    }
    if (abort !== this.abort) return;
    this.abort = null;
    this.toggle(false);
  }

  /** An image that the server has forgotten is sent once more. */
  async listen(answer, signal) {
    try {
      return await this.hear(await this.heldImages(this.asked), answer, signal);
    } catch (error) {
      if (told(error).reason !== "IMAGE_NOT_FOUND") throw error;
      return this.hear(await this.heldImages(this.asked, true), answer, signal);
    }
  }

  async hear(images, answer, signal) {
    const started = performance.now();
    let said = "", first;
    for await (const event of generate(this.question(this.asked, images), signal)) {
      if (event.type === "text") {
        first ??= performance.now() - started;
        said += event.text;
        answer.append(event.text);
        this.log.scrollTop = this.log.scrollHeight;
      } else if (event.type === "finished") {
        said = event.result.answer;
        answer.append(el("span", { className: "times" }, `first token ${ms(first ?? 0)}, total ${ms(performance.now() - started)}`));
      }
    }
    return said;
  }

  toggle(running) {
    this.send.disabled = running;
    this.stop.disabled = !running;
    this.code.disabled = false;
  }

  show(role, text, image = null) {
    const paragraph = el("p", { className: "said" }, text);
    this.log.append(el("div", { className: `message ${role}` },
      el("span", { className: "who" }, role === "user" ? "You" : "Model"),
      image ? el("span", { className: "thumbnail" }, el("img", { src: image.url, alt: `Image shown: ${image.name}` })) : null, paragraph));
    this.log.scrollTop = this.log.scrollHeight;
    return paragraph;
  }
}

const shownIn = (messages) => messages.map(({ image }) => image).filter(Boolean);
