// Server-sent events by fetch, because EventSource hides why a server refuses.

const RETRY = 1000, MAX_RETRY = 15_000; // milliseconds

/**
 * Calls `onMessage` with the JSON of each event, and `onState` with "connecting", "live" or what went wrong, until
 * `signal` is aborted. A stream that ends is asked for again; one that fails, after a pause that grows.
 */
export async function follow(url, headers, signal, onMessage, onState) {
  let pause = RETRY;
  while (!signal.aborted) {
    onState("connecting");
    try {
      const response = await fetch(url, { headers: { Accept: "text/event-stream", ...headers }, signal });
      if (!response.ok) throw new Error(await reason(response));
      for await (const message of events(response.body)) {
        if (message.error) throw new Error(message.error.message);
        onState("live");
        onMessage(message);
        pause = RETRY;
      }
    } catch (error) {
      if (signal.aborted) return;
      onState(error.message || "the connection was lost");
      await sleep(pause, signal);
      pause = Math.min(2 * pause, MAX_RETRY);
    }
  }
}

/** The message of a refusal, in whichever form this process gives it. */
export async function reason(response) {
  try {
    const value = await response.json();
    return value.error?.message ?? value.message ?? `HTTP ${response.status}`;
  } catch {
    return `HTTP ${response.status}`;
  }
}

async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) if (part.startsWith("data: ")) yield JSON.parse(part.slice(6));
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

const sleep = (milliseconds, signal) => new Promise((resolve) => {
  const timer = setTimeout(resolve, milliseconds);
  signal.addEventListener("abort", () => { clearTimeout(timer); resolve(); }, { once: true });
});
