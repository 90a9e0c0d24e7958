// Calls of the npm package openai, each a case whose outcome is printed as JSON: `node third_party.mjs URL MODEL IMAGE`.
// An outcome is as in tests/interop/third_party.py.
import fs from 'node:fs';
import OpenAI from 'openai';

const [url, model, image] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: 'unused', maxRetries: 0 });
const picture = `data:image/jpeg;base64,${fs.readFileSync(image, 'base64')}`;
const shown = [
  { type: 'text', text: 'What is in the picture?' },
  { type: 'image_url', image_url: { url: picture } },
];

function ask(content = 'hello', more = {}) {
  const messages = Array.isArray(content) && content[0].role ? content : [{ role: 'user', content }];
  return client.chat.completions.create({ model, messages, ...more });
}

const text = async (reply) => (await reply).choices[0].message.content;

async function collected(array) {
  const found = [];
  for await (const each of array) found.push(each);
  return found;
}

async function streamed() {
  const chunks = await collected(await ask('hello', { stream: true, stream_options: { include_usage: true } }));
  const said = chunks.map(({ choices }) => choices[0]?.delta.content ?? '').join('');
  return [said, chunks.at(-2).choices[0].finish_reason, chunks.at(-1).usage.completion_tokens > 0];
}

async function leaving() {
  for await (const chunk of await ask('hello', { stream: true })) return chunk.object;
}

async function spelled() {
  const reply = await ask('hello', { logprobs: true, top_logprobs: 2 });
  return Buffer.from(reply.choices[0].logprobs.content.flatMap(({ bytes }) => bytes)).toString();
}

const respond = (more = {}) => client.responses.create({ model, input: 'hello', ...more });
const seen = [
  {
    role: 'user',
    content: [
      { type: 'input_text', text: 'What is in the picture?' },
      { type: 'input_image', image_url: picture, detail: 'auto' },
    ],
  },
];

const talk = [
  { role: 'system', content: '' },
  { role: 'user', content: 'hello' },
  { role: 'assistant', content: '' },
  { role: 'user', content: 'again' },
];
const tool = { type: 'function', function: { name: 'weather', parameters: { type: 'object', properties: {} } } };
const format = { type: 'json_schema', json_schema: { name: 'count', schema: { type: 'object' } } };

const cases = {
  models: async () => (await collected(client.models.list())).map(({ id }) => id),
  answer: () => text(ask()),
  stream: streamed,
  leaving,
  image: () => text(ask(shown)),
  'image alone': () => text(ask(shown.slice(1))),
  conversation: () => text(ask(talk)),
  logprobs: spelled,
  sampling: () => text(ask('hello', { temperature: 0, top_p: 0, seed: -1, stop: ['zzz'], max_completion_tokens: 9 })),
  tools: () => text(ask('hello', { tools: [tool] })),
  'structured output': () => text(ask('hello', { response_format: format })),
  n: () => text(ask('hello', { n: 2 })),
  response: async () => (await respond()).output_text,
  'streamed response': async () => {
    const events = await collected(await respond({ stream: true }));
    return [events.at(-1).response.output[0].content[0].text, events.at(-1).response.status];
  },
  'response about an image': async () => (await respond({ input: seen })).output_text,
  'tools of a response': () => respond({ tools: [{ type: 'web_search' }] }),
  embeddings: async () => (await client.embeddings.create({ model, input: 'hello' })).data,
};

const outcomes = {};
for (const [name, run] of Object.entries(cases)) {
  try {
    outcomes[name] = { result: await run() };
  } catch (error) {
    const { status = null, param = null, message } = error;
    outcomes[name] = { status, param, message };
  }
}
process.stdout.write(JSON.stringify(outcomes));
