// Shown to a browser without a session: how the owner of the node opens the page, and a field for a key.

import { useState } from "preact/hooks";
import { CopyLine } from "./CopyLine";

export function Locked({ enter }: { enter: (key: string) => Promise<void> }) {
  const [key, setKey] = useState("");
  const [problem, setProblem] = useState("");
  const submit = async () => {
    try {
      await enter(key);
    } catch (error) {
      setProblem(error instanceof Error ? error.message : String(error));
    }
  };
  return (
    <main class="locked card" id="main">
      <h1>NeuroShard is locked</h1>
      <p>Only the owner of this node can open its dashboard. Run this command in a terminal:</p>
      <CopyLine text="neuroshard open" name="Command that opens the dashboard" />
      <p>
        Or <strong>start NeuroShard again</strong> from its menu or icon: a second start opens the dashboard of the first.
      </p>
      <p class="small muted">
        For a demo, add <code>--demo</code>; for a data folder of your choice, <code>--data-dir FOLDER</code>. If this browser is on another
        computer, add <code>--print</code> and enter the address here.
      </p>
      <form
        onSubmit={(event) => {
          event.preventDefault();
          void submit();
        }}
      >
        <label>
          <span>Address or key</span>
          <input
            type="password"
            autocomplete="off"
            required
            value={key}
            onInput={(event) => {
              setKey(event.currentTarget.value);
              setProblem("");
            }}
          />
        </label>
        <button type="submit" class="button">
          Open the dashboard
        </button>
      </form>
      {problem && (
        <p class="text-bad small" role="alert">
          {problem}
        </p>
      )}
    </main>
  );
}
