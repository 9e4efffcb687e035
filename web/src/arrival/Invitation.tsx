// An invitation: the field that takes it (pasted, dropped or from a file), and what it says.

import type { InvitationBody } from "../api/responses";
import { useState } from "preact/hooks";
import { Facts } from "../components/parts";
import { Fault } from "../setup/fields";
import { factsOf, PASTE } from "./words";

const LONGEST_FILE_BYTES = 64 * 1024;
const SUFFIX = ".neuroshard-invitation";

export function InvitationField(props: { value: string; onInput: (text: string) => void; fault: string | undefined }) {
  const [isOver, setIsOver] = useState(false);
  const [tooLong, setTooLong] = useState(false);
  const take = async (file: File | null | undefined) => {
    if (!file) return;
    setTooLong(file.size > LONGEST_FILE_BYTES);
    if (file.size <= LONGEST_FILE_BYTES) props.onInput((await file.text()).trim());
  };
  const fault = tooLong ? PASTE.tooLong : props.fault;
  return (
    <div
      class={`setup-field drop ${isOver ? "drop-over" : ""}`}
      onDragOver={(event) => {
        event.preventDefault();
        setIsOver(true);
      }}
      onDragLeave={() => setIsOver(false)}
      onDrop={(event) => {
        event.preventDefault();
        setIsOver(false);
        const dropped = event.dataTransfer?.files[0];
        if (dropped) void take(dropped);
        else props.onInput(event.dataTransfer?.getData("text") ?? "");
      }}
    >
      <label for="invitation">{PASTE.label}</label>
      <textarea
        id="invitation"
        rows={5}
        class="mono"
        value={props.value}
        autocomplete="off"
        autocapitalize="none"
        spellcheck={false}
        aria-invalid={fault ? true : undefined}
        aria-describedby={`invitation-hint${fault ? " invitation-fault" : ""}`}
        onInput={(event) => {
          setTooLong(false);
          props.onInput(event.currentTarget.value);
        }}
      />
      <p class="muted small" id="invitation-hint">
        {PASTE.hint}
      </p>
      <Fault id="invitation-fault" text={fault} />
      <div>
        <label class="button file-button">
          {PASTE.open}
          <input type="file" class="hidden-visually" accept={`${SUFFIX},text/plain`} onChange={(event) => void take(event.currentTarget.files?.[0])} />
        </label>
      </div>
    </div>
  );
}

export function InvitationFacts({ invitation }: { invitation: InvitationBody }) {
  return <Facts rows={factsOf(invitation)} />;
}
