// Requests to the server: the available methods, and a race as a stream of events.

export class Refused extends Error {}

export async function about() {
  const response = await fetch("api/about");
  if (!response.ok) throw new Refused("The server does not say what it offers.");
  return response.json();
}

/** Post a race and call `handle` with every event. Resolves at its end; throws Refused with a one-line message. */
export async function race(wanted, handle, signal) {
  const response = await fetch("api/race", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(wanted),
    signal,
  });
  if (!response.ok) {
    const told = await response.json().catch(() => ({}));
    throw new Refused(told.error?.message ?? `The server answered ${response.status}.`);
  }
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let pending = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (pending + value).split("\n\n");
    pending = parts.pop();
    for (const part of parts) if (part.startsWith("data: ")) handle(JSON.parse(part.slice(6)));
  }
}
