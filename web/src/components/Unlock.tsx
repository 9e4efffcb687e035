// Asks for the API secret when the node listens beyond this computer (--host).

import { useState } from "preact/hooks";
import type { NodeActions } from "../api/actions";

export function Unlock({ actions }: { actions: NodeActions }) {
  const [secret, setSecret] = useState("");
  const [problem, setProblem] = useState("");
  const submit = async () => {
    try {
      if (!(await actions.unlock(secret.trim()))) setProblem("That is not the secret.");
    } catch (error) {
      setProblem(error instanceof Error ? error.message : String(error));
    }
  };
  return (
    <main class="unlock card" id="main">
      <h1>This node asks for its secret</h1>
      <p class="muted">
        It listens to other computers, so it must know that you own it. The secret is in the file <code>api-secret</code> in the
        node's data folder; <code>neuroshard status</code> prints where that is.
      </p>
      <form
        onSubmit={(event) => {
          event.preventDefault();
          void submit();
        }}
      >
        <label>
          <span>API secret</span>
          <input
            type="password"
            autocomplete="current-password"
            required
            value={secret}
            onInput={(event) => setSecret(event.currentTarget.value)}
          />
        </label>
        <button type="submit" class="button button-primary">
          Open the dashboard
        </button>
      </form>
      <p class="text-bad small" role="alert">
        {problem}
      </p>
    </main>
  );
}
