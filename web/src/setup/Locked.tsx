// Somebody came without the key of the program: other users of this computer must not see a new wallet's words.

import { useState } from "preact/hooks";
import { Field, useSending } from "./fields";
import type { SetupCalls } from "./setup";

export function Locked({ calls }: { calls: SetupCalls }) {
  const [secret, setSecret] = useState("");
  const { busy, faults, send } = useSending();
  const submit = async () => {
    if (await calls.unlock(secret.trim())) calls.openDashboard();
  };
  return (
    <form
      class="setup-step"
      onSubmit={(event) => {
        event.preventDefault();
        send(submit);
      }}
    >
      <h1>NeuroShard waits to be set up</h1>
      <p>
        This address does not contain the key with which the program opens this page, or the key was used already. <strong>Start NeuroShard once
        more</strong>: it opens the right page.
      </p>
      <Field
        id="secret"
        label="Or enter the API secret"
        value={secret}
        onInput={setSecret}
        fault={faults.other || undefined}
        hint={
          <>
            It is in the file <code>api-secret</code> in the data folder.
          </>
        }
      />
      <div class="setup-buttons">
        <button type="submit" class="button button-primary" disabled={busy || secret.trim() === ""}>
          Continue
        </button>
      </div>
    </form>
  );
}
