// The contract as proto-loader reads it from the proto files, and protobuf's JSON, in which proto-loader lacks the
// well-known types.
'use strict';

const path = require('node:path');
const loader = require('@grpc/proto-loader');

const PROTO = path.join(__dirname, '..', '..', '..', 'proto');
const HEALTH = path.join(path.dirname(require.resolve('grpc-health-check/package.json')), 'proto');
const FILES = ['inference', 'session', 'image', 'server', 'admin'].map((noun) => `legato/v1/${noun}.proto`);

const definitions = loader.loadSync([...FILES, 'health/v1/health.proto'], {
  includeDirs: [PROTO, path.join(PROTO, 'third_party'), HEALTH],
  longs: String,
  enums: String,
  bytes: String,
});

// Values of the well-known types: from protobuf's JSON, and to it.
const WELL_KNOWN = {
  'google.protobuf.Duration': {
    from: (text) => split(text.slice(0, -1)),
    to: ({ seconds = '0', nanos = 0 }) => `${seconds}${fraction(nanos)}s`,
  },
  'google.protobuf.Timestamp': {
    from: (text) => {
      const [date, part] = text.slice(0, -1).split('.');
      return { ...split(`0.${part ?? 0}`), seconds: String(Date.parse(`${date}Z`) / 1000) };
    },
    to: ({ seconds = '0', nanos = 0 }) =>
      new Date(Number(seconds) * 1000).toISOString().replace('.000Z', `${fraction(nanos)}Z`),
  },
  'google.protobuf.Any': {
    from: (any) => ({ type_url: any['@type'], value: any['@value'] }),
    to: ({ type_url: type, value = '' }) => ({ '@type': type, '@value': value }),
  },
};

function split(text) {
  const [seconds, part = ''] = text.split('.');
  return { seconds, nanos: Number(part.padEnd(9, '0')) };
}

// What JSON writes behind the point: nothing, or 3, 6 or 9 digits.
function fraction(nanos) {
  if (nanos === 0) return '';
  return `.${String(nanos).padStart(9, '0').replace(/(000){1,2}$/, '')}`;
}

// The full name of a type that is named from within another.
function resolve(scope, name) {
  const places = scope.split('.');
  while (places.length > 0) {
    places.pop();
    const full = [...places, name].join('.');
    if (full in definitions) return full;
  }
  throw new Error(`${scope} speaks of an unknown ${name}`);
}

// A message with its well-known types converted, `way` being `from` or `to`.
function convert(type, message, way) {
  if (type in WELL_KNOWN) return WELL_KNOWN[type][way](message);
  const converted = {};
  for (const field of definitions[type].type.field) {
    const value = message[field.name];
    if (value === undefined || value === null) continue;
    const one = (each) =>
      field.type === 'TYPE_MESSAGE' ? convert(resolve(type, field.typeName), each, way) : each;
    converted[field.name] = Array.isArray(value) ? value.map(one) : one(value);
  }
  return converted;
}

// A method: how grpc-js calls it, and the names of its messages' types.
function method(call) {
  const [service, name] = call.split('/');
  const found = definitions[service][name];
  const scope = `${service}.${name}`;
  return {
    ...found,
    requestName: resolve(scope, found.requestType.type.name),
    responseName: resolve(scope, found.responseType.type.name),
  };
}

module.exports = {
  method,
  toMessage: (type, json) => convert(type, json, 'from'),
  toJson: (type, message) => convert(type, message, 'to'),
  statusOf: (bytes) => definitions['google.rpc.Status'].deserialize(bytes),
};
