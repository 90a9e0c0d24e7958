// The conformance list by grpc-js and proto-loader; tests/conformance/README.md says how it is called and what it
// prints.
'use strict';

const fs = require('node:fs');
const path = require('node:path');
const grpc = require('@grpc/grpc-js');
const contract = require('./contract');

const DETAILS = 'grpc-status-details-bin';

// The sum of a stream's checkpoints, as protobuf merges them.
function checkpointOf(messages) {
  const whole = {};
  for (const [name, value] of messages.flatMap(({ checkpoint }) => Object.entries(checkpoint ?? {}))) {
    whole[name] = Array.isArray(value) ? [...(whole[name] ?? []), ...value] : value;
  }
  return whole;
}

// A message to send: the template with pictures and earlier answers put in.
function fill(template, pictures, done) {
  if (Array.isArray(template)) return template.map((each) => fill(each, pictures, done));
  if (template === null || typeof template !== 'object') return template;
  if ('$file' in template) return fs.readFileSync(path.join(pictures, template.$file), 'base64');
  if ('$step' in template) {
    return template.at.split('.').reduce((found, name) => found[name], done[template.$step].messages.at(-1));
  }
  if ('$checkpoint' in template) return checkpointOf(done[template.$checkpoint].messages);
  const filled = Object.entries(template).map(([name, value]) => [name, fill(value, pictures, done)]);
  return Object.fromEntries(filled);
}

function details(metadata) {
  const [bytes] = metadata.get(DETAILS);
  return bytes ? contract.toJson('google.rpc.Status', contract.statusOf(bytes)).details ?? [] : [];
}

// Makes one call. Every kind of call is bidirectional on the wire.
function call(client, step, messages) {
  const method = contract.method(step.call);
  const deadline = Date.now() + 1000 * (step.timeout ?? 60);
  const metadata = new grpc.Metadata();
  for (const [key, value] of Object.entries(step.metadata ?? {})) metadata.set(key, value);
  const running = client.makeBidiStreamRequest(
    method.path, method.requestSerialize, method.responseDeserialize, metadata, { deadline });
  const received = [];
  running.on('data', (message) => {
    if (received.length === step.cancelAfter) return; // it was on its way when the call was cancelled
    received.push(contract.toJson(method.responseName, message));
    if (received.length === step.cancelAfter) running.cancel();
  });
  running.on('error', () => {}); // its status is reported
  for (const message of messages) running.write(contract.toMessage(method.requestName, message));
  running.end();
  return new Promise((resolve) => {
    running.on('status', ({ code, metadata }) => {
      resolve({ code: grpc.status[code], messages: received, details: details(metadata) });
    });
  });
}

async function main(address, list, pictures, ...names) {
  const client = new grpc.Client(address, grpc.credentials.createInsecure());
  for (const { name, steps } of JSON.parse(fs.readFileSync(list, 'utf8'))) {
    if (!names.includes(name)) continue;
    const seen = [];
    for (const step of steps) seen.push(await call(client, step, fill(step.send, pictures, seen)));
    console.log(JSON.stringify({ case: name, steps: seen }));
  }
  client.close();
}

main(...process.argv.slice(2));
