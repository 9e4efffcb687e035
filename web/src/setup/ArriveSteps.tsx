// The first question: join with an invitation, see the demo, or train on one's own text.

import type { FinishedBody } from "../api/bodies";
import { useState } from "preact/hooks";
import { InvitationFacts, InvitationField } from "../arrival/Invitation";
import { NearbyRuns } from "../arrival/NearbyRuns";
import { BEGIN, OWN_TEXT, PASTE, SHOWN, textWords } from "../arrival/words";
import { Buttons, Fault, Field, useSending } from "./fields";
import { FolderPicker } from "./FolderPicker";
import { Starting } from "./StartStep";
import type { StepProps } from "./Wizard";

export function ArriveStep({ setup, calls, go, onChange }: StepProps) {
  const { busy, faults, send } = useSending();
  const [started, setStarted] = useState<FinishedBody | null>(null);
  if (started !== null) return <Starting url={started.url} warning={started.warning} calls={calls} />;
  const publicRun = setup.arrival.public_run;
  return (
    <>
      <h1 tabIndex={-1}>{BEGIN.title}</h1>
      <p>{BEGIN.about}</p>
      <div class="setup-answers">
        <Answer name={BEGIN.join} about={BEGIN.joinAbout} onPick={() => go("invitation")} busy={busy} />
        <Answer name={BEGIN.demo} about={BEGIN.demoAbout} onPick={() => send(async () => setStarted(await calls.startDemo()))} busy={busy} />
        <Answer name={BEGIN.text} about={BEGIN.textAbout} onPick={() => go("text")} busy={busy} />
      </div>
      {setup.arrival.nearby !== null && (
        <NearbyRuns
          heading="h2"
          runs={setup.arrival.nearby}
          busy={busy}
          onJoin={(run_id) => send(async () => onChange(await calls.choosePurpose({ purpose: "nearby", run_id }), "wallet"))}
        />
      )}
      <Fault id="arrive-fault" text={faults.other || Object.values(faults.fields)[0]} />
      <p class="muted small">{publicRun === null ? BEGIN.noPublicRun : BEGIN.publicRun(publicRun)}</p>
    </>
  );
}

function Answer({ name, about, busy, onPick }: { name: string; about: string; busy: boolean; onPick: () => void }) {
  return (
    <button type="button" class="setup-answer" aria-disabled={busy} onClick={() => busy || onPick()}>
      <strong>{name}</strong>
      <span class="muted small">{about}</span>
    </button>
  );
}

/** Paste an invitation; then its page, with Join. A link that was opened comes here at once. */
export function InvitationStep({ setup, calls, go, onChange }: StepProps) {
  const { invitation, link_fault: linkFault } = setup.arrival;
  const [wantsOther, setWantsOther] = useState(false);
  const [text, setText] = useState("");
  const { busy, faults, send } = useSending();
  if (invitation !== null && linkFault === null && !wantsOther) {
    const join = async () => onChange(await calls.choosePurpose({ purpose: "join" }), "wallet");
    return (
      <form
        onSubmit={(event) => {
          event.preventDefault();
          send(join);
        }}
      >
        <h1 tabIndex={-1}>{SHOWN.title(invitation.name)}</h1>
        <p>{SHOWN.about}</p>
        <InvitationFacts invitation={invitation} />
        <p class="muted small">{SHOWN.safe}</p>
        <Fault id="join-fault" text={faults.other || Object.values(faults.fields)[0]} />
        <Buttons next={SHOWN.join} busy={busy} back={() => setWantsOther(true)} backLabel={SHOWN.other} />
      </form>
    );
  }
  const show = async () => {
    onChange(await calls.readInvitation(text));
    setWantsOther(false);
  };
  return (
    <form
      onSubmit={(event) => {
        event.preventDefault();
        send(show);
      }}
    >
      <h1 tabIndex={-1}>{PASTE.title}</h1>
      <InvitationField value={text} onInput={setText} fault={faults.fields.invitation ?? (text === "" ? (linkFault ?? undefined) : undefined)} />
      <Fault id="read-fault" text={faults.other} />
      <Buttons next={PASTE.show} busy={busy} back={() => go("arrive")} />
    </form>
  );
}

export function TextStep({ setup, calls, go, onChange }: StepProps) {
  const [folder, setFolder] = useState(setup.arrival.text?.path ?? "");
  const { busy, faults, send } = useSending();
  const choose = async () => onChange(await calls.choosePurpose({ purpose: "text", folder }), "wallet");
  const found = setup.arrival.text;
  return (
    <form
      onSubmit={(event) => {
        event.preventDefault();
        send(choose);
      }}
    >
      <h1 tabIndex={-1}>{OWN_TEXT.title}</h1>
      <p>{OWN_TEXT.about}</p>
      <Field
        id="folder"
        label={OWN_TEXT.label}
        value={folder}
        onInput={setFolder}
        fault={faults.fields.folder}
        hint={found && found.path === folder ? textWords(found) : OWN_TEXT.hint}
      />
      <FolderPicker calls={calls} start={folder} onChoose={setFolder} />
      <Fault id="text-fault" text={faults.other} />
      <Buttons next="Next" busy={busy} back={() => go("arrive")} />
    </form>
  );
}
