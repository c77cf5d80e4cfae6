import assert from "node:assert/strict";
import http from "node:http";
import { test } from "node:test";

import plugin, { PROVIDER } from "../index.js";
import { Runs } from "../runs.js";

/** OpenClaw as the plugin sees it: hooks and provider are caught, requests are looked at. */
function host(config = {}) {
  const hooks = {};
  const warnings = [];
  let provider;
  plugin.register({
    config,
    logger: { warn: (line) => warnings.push(line) },
    on: (name, handler) => (hooks[name] = handler),
    registerProvider: (given) => (provider = given),
  });
  const sent = (options) => {
    let seen;
    const streamFn = (_model, _context, given) => ((seen = given), "stream");
    const wrapped = provider.wrapStreamFn({ streamFn });
    assert.equal(wrapped({}, {}, options), "stream");
    return seen;
  };
  return { hooks, provider, sent, warnings };
}

let sessions = 0;
const fresh = () => `session-${(sessions += 1)}`;

function begin(hooks, context, prompt = "hello") {
  return hooks.before_prompt_build({ prompt, messages: [] }, context);
}

test("it owns exactly one provider id", () => {
  assert.equal(host().provider.id, PROVIDER);
});

test("a user's run is main, with the run's own name where OpenClaw tells it", () => {
  const { hooks, sent } = host();
  const sessionId = fresh();
  begin(hooks, { sessionId, runId: "run-1", trigger: "user" });
  const options = { requestId: "run-1:model:3", sessionId, headers: { traceparent: "x" } };
  assert.deepEqual(sent(options).headers, {
    traceparent: "x",
    "x-session-id": sessionId,
    "x-run-id": "run-1",
    "x-turn-type": "main",
  });
  assert.deepEqual(options.headers, { traceparent: "x" }); // OpenClaw's own object stays
});

test("2026.3.23 joins by session; all requests of a run get one name", () => {
  const { hooks, sent } = host();
  const sessionId = fresh();
  begin(hooks, { sessionId, trigger: "user" });
  const [one, two] = [sent({ sessionId }).headers, sent({ sessionId }).headers];
  assert.equal(one["x-session-id"], sessionId);
  assert.ok(one["x-run-id"]);
  assert.equal(one["x-run-id"], two["x-run-id"]);
  begin(hooks, { sessionId, trigger: "user" });
  assert.notEqual(sent({ sessionId }).headers["x-run-id"], one["x-run-id"]);
});

test("sessions at once are not mixed up", () => {
  const { hooks, sent } = host();
  const [a, b] = [fresh(), fresh()];
  begin(hooks, { sessionId: a, runId: `${a}-run`, trigger: "user" });
  begin(hooks, { sessionId: b, runId: `${b}-run`, trigger: "heartbeat" });
  assert.equal(sent({ requestId: `${a}-run:model:1` }).headers["x-session-id"], a);
  assert.equal(sent({ requestId: `${b}-run:model:1` }).headers["x-session-id"], b);
  assert.equal(sent({ sessionId: a }).headers["x-turn-type"], "main");
  assert.equal(sent({ sessionId: b }).headers["x-turn-type"], "side");
});

for (const trigger of ["heartbeat", "cron", "memory", "manual", "overflow", undefined]) {
  test(`a run by ${trigger} is a side request`, () => {
    const { hooks, sent } = host();
    const sessionId = fresh();
    begin(hooks, { sessionId, trigger });
    assert.equal(sent({ sessionId }).headers["x-turn-type"], "side");
  });
}

test("a memory flush between two turns of a session is side, the turns are main", () => {
  const { hooks, sent } = host();
  const sessionId = fresh();
  const types = ["user", "memory", "user"].map((trigger) => {
    begin(hooks, { sessionId, trigger });
    return sent({ sessionId }).headers["x-turn-type"];
  });
  assert.deepEqual(types, ["main", "side", "main"]);
});

test("the greeting after a reset and a slug are side requests", () => {
  const { hooks, sent } = host();
  const [a, b] = [fresh(), fresh()];
  const greeting = "A new session was started via /new or /reset. Run your Session Startup";
  begin(hooks, { sessionId: a, trigger: "user" }, greeting);
  begin(hooks, { sessionId: b, sessionKey: "temp:slug-generator", trigger: "user" });
  assert.equal(sent({ sessionId: a }).headers["x-turn-type"], "side");
  assert.equal(sent({ sessionId: b }).headers["x-turn-type"], "side");
});

test("a compaction within a run is no turn of the run", () => {
  const { hooks, sent } = host();
  const sessionId = fresh();
  begin(hooks, { sessionId, runId: `${sessionId}-run`, trigger: "user" });
  const requestId = `${sessionId}:compaction:cmp-1:model:1`;
  assert.equal(sent({ requestId, sessionId }).headers["x-turn-type"], "side");
});

test("what no run makes is a side request of its session", () => {
  const { provider, sent } = host();
  const { headers } = provider.resolveTransportTurnState({ sessionId: "s" });
  assert.deepEqual(headers, { "x-session-id": "s", "x-turn-type": "side" });
  assert.deepEqual(sent(undefined).headers, { "x-turn-type": "side" });
});

async function listening(answer) {
  const asked = [];
  const server = http.createServer((request, response) => {
    asked.push([request.method, request.url, request.headers.authorization]);
    response.writeHead(answer).end("{}");
  });
  await new Promise((done) => server.listen(0, "127.0.0.1", done));
  const baseUrl = `http://127.0.0.1:${server.address().port}/v1`;
  const config = { models: { providers: { [PROVIDER]: { baseUrl, apiKey: "key" } } } };
  return { asked, config, close: () => server.close() };
}

test("a reset or delete ends the session at the gateway, once", async () => {
  const { asked, config, close } = await listening(200);
  try {
    const { hooks, warnings } = host(config);
    const [a, b] = [`${fresh()}:x`, fresh()];
    begin(hooks, { sessionId: a, sessionKey: "agent:main:a", trigger: "user" });
    begin(hooks, { sessionId: b, sessionKey: "agent:main:b", trigger: "user" });
    await hooks.session_end({ sessionId: a, sessionKey: "agent:main:a", reason: "deleted" });
    await hooks.subagent_ended({ targetSessionKey: "agent:main:a", outcome: "deleted" });
    await hooks.subagent_ended({ targetSessionKey: "agent:main:b", outcome: "reset" });
    assert.deepEqual(asked, [
      ["POST", `/v1/sessions/${encodeURIComponent(a)}/end`, "Bearer key"],
      ["POST", `/v1/sessions/${b}/end`, "Bearer key"],
    ]);
    assert.deepEqual(warnings, []);
  } finally {
    close();
  }
});

test("a session that goes on is not ended", async () => {
  const { asked, config, close } = await listening(200);
  try {
    const { hooks } = host(config);
    const sessionId = fresh();
    begin(hooks, { sessionId, sessionKey: "agent:main:c", trigger: "user" });
    for (const reason of ["compaction", "shutdown", "restart", "unknown"]) {
      await hooks.session_end({ sessionId, reason });
    }
    await hooks.subagent_ended({ targetSessionKey: "agent:main:c", outcome: "ok" });
    assert.deepEqual(asked, []);
  } finally {
    close();
  }
});

test("a gateway that is away or refuses is a warning without content, never an error", async () => {
  const { config, close } = await listening(401);
  const { hooks, warnings } = host(config);
  await hooks.session_end({ sessionId: fresh() });
  close();
  const away = host({ models: { providers: { [PROVIDER]: { baseUrl: "http://127.0.0.1:9" } } } });
  await away.hooks.session_end({ sessionId: fresh() });
  assert.deepEqual(warnings, ["openclaw-rl: end of session: HTTP 401"]);
  assert.equal(away.warnings.length, 1);
  await host({}).hooks.session_end({ sessionId: fresh() });
});

test("memory is bounded", () => {
  const runs = new Runs();
  for (let n = 0; n < 5000; n += 1) {
    runs.begin({ sessionId: `s${n}`, runId: `r${n}`, sessionKey: `k${n}`, trigger: "user" }, "", () => "x");
  }
  assert.equal(runs.find({ sessionId: "s0" }), undefined);
  assert.equal(runs.sessionOf("k0"), undefined);
  assert.equal(runs.find({ requestId: "r4999:model:1" }).sessionId, "s4999");
});
