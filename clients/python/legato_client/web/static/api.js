// What this page asks its process. Everything fails with a Failure.

/** A failure as the process tells it: message, code, reason, fields, hint. */
export class Failure extends Error {
  constructor(told) {
    super(told.message);
    this.told = told;
  }
}

/** Any thrown value as a failure to show. */
export function told(error) {
  if (error instanceof Failure) return error.told;
  return { code: "PAGE", message: error.message ?? String(error), hint: "" };
}

export const describe = async () => (await send("/playground/server")).json();

/** Hand the server an image: {image_id, width, height}. */
export const upload = async (blob) =>
  (await send("/playground/pictures", { method: "POST", body: blob })).json();

/** The same request as programs: {python, go, grpcurl}. */
export const code = async (request) => (await post("/playground/code", request)).json();

/** Yields the events of one task as they arrive; aborting the signal cancels the work. */
export async function* generate(request, signal) {
  const response = await post("/playground/generate", request, signal);
  for await (const line of lines(response.body)) {
    const event = JSON.parse(line);
    if (event.type === "failed") throw new Failure(event);
    yield event;
    if (event.type === "finished") return;
  }
  throw new Failure({ code: "UNAVAILABLE", message: "the answer ended early", hint: "Ask again." });
}

const post = (path, value, signal) =>
  send(path, {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(value),
    signal,
  });

async function send(path, options) {
  let response;
  try {
    response = await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Failure({
      code: "UNAVAILABLE",
      message: "this page's own process does not answer",
      hint: "Is `legato playground` still running?",
    });
  }
  if (!response.ok) throw new Failure(await failureOf(response));
  return response;
}

async function failureOf(response) {
  const text = await response.text();
  try {
    const value = JSON.parse(text);
    if (value.type === "failed") return value;
  } catch { /* not of this process */ }
  return { code: `HTTP ${response.status}`, message: text.trim() || response.statusText, hint: "" };
}

async function* lines(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) break;
      const parts = (rest + value).split("\n");
      rest = parts.pop();
      yield* parts.filter(Boolean);
    }
    if (rest) yield rest;
  } finally {
    reader.cancel().catch(() => {});
  }
}
