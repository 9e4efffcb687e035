// The members of the run: invite, revoke, name a deputy; and join another run.

import type { IssuedBody, KnockBody, MadeInvitationBody, MembersBody, RunMembersBody } from "../api/bodies";
import type { NodeStatus } from "../api/status";
import { useEffect, useRef, useState } from "preact/hooks";
import type { NodeActions } from "../api/actions";
import { InvitationFacts, InvitationField } from "../arrival/Invitation";
import { NearbyRuns } from "../arrival/NearbyRuns";
import { DEPUTY, INVITE, KNOCK, noInvitations, OTHER_RUN, PASTE, placesLeft, SHOWN } from "../arrival/words";
import { CopyLine } from "../components/CopyLine";
import { Card } from "../components/parts";
import { dateAndTime } from "../format";
import { Choice, Fault, Field, useSending } from "../setup/fields";

const READ_MS = 4_000;
const QUIET = 4; // modules around a QR code

interface Props {
  status: NodeStatus;
  reachable: boolean;
  actions: NodeActions;
}

export function Friends({ status, reachable, actions }: Props) {
  const [members, setMembers] = useState<MembersBody | null>(null);
  const [trouble, setTrouble] = useState("");
  const read = async () => {
    try {
      setMembers(await actions.readMembers());
      setTrouble("");
    } catch (error) {
      setTrouble(error instanceof Error ? error.message : String(error));
    }
  };
  useEffect(() => {
    if (!reachable) return;
    void read();
    const timer = setInterval(() => void read(), READ_MS);
    return () => clearInterval(timer);
  }, [reachable]);
  return (
    <div class="friends">
      <h1 class="view-title">Friends</h1>
      {trouble && reachable && <p class="text-bad">{trouble}</p>}
      {members && (
        <div class="grid">
          {members.knocks.map((one) => (
            <Knock key={one.wallet_id} one={one} actions={actions} onChange={read} />
          ))}
          {members.shown.invitation !== null || members.shown.fault !== null ? null : <Invite status={status} run={members.run} actions={actions} onChange={read} />}
          <JoinAnother startedAt={status.started_at} members={members} actions={actions} onChange={read} />
          {members.run?.is_owner && members.run.has_deputies && members.run.invitations.length > 0 && <Deputies run={members.run} actions={actions} onChange={read} />}
        </div>
      )}
    </div>
  );
}

function Knock({ one, actions, onChange }: { one: KnockBody; actions: NodeActions; onChange: () => Promise<void> }) {
  const { busy, faults, send } = useSending();
  const answer = (isAllowed: boolean) => () =>
    send(async () => {
      await actions.answerKnock(one.wallet_id, isAllowed);
      await onChange();
      document.querySelector("main")?.focus(); // the card is gone
    });
  return (
    <Card title={KNOCK.title(one.name)} hint={KNOCK.about} wide>
      <p class="mono">{one.words}</p>
      <Fault id="knock-fault" text={faults.other} />
      <div class="row-actions">
        <button type="button" class="button button-primary" aria-disabled={busy} onClick={answer(true)}>
          {KNOCK.allow}
        </button>
        <button type="button" class="button" aria-disabled={busy} onClick={answer(false)}>
          {KNOCK.refuse}
        </button>
      </div>
    </Card>
  );
}

interface InviteProps {
  status: NodeStatus;
  run: RunMembersBody | null;
  actions: NodeActions;
  onChange: () => Promise<void>;
}

function Invite({ status, run, actions, onChange }: InviteProps) {
  const [label, setLabel] = useState("");
  const [uses, setUses] = useState("1");
  const [days, setDays] = useState("7");
  const [mayInvite, setMayInvite] = useState(false);
  const [made, setMade] = useState<MadeInvitationBody | null>(null);
  const { busy, faults, send } = useSending(["label", "uses", "days"]);
  if (run === null || !run.may_invite) {
    return (
      <Card title={INVITE.title}>
        <p>{run === null ? noInvitations(status) : INVITE.guest}</p>
      </Card>
    );
  }
  const make = async () => {
    setMade(await actions.invite({ label, uses: Number(uses), days: Number(days), may_invite: mayInvite }));
    setLabel("");
    await onChange();
  };
  return (
    <Card title={INVITE.title} hint={INVITE.hint} wide>
      <form
        class="setup-limits"
        onSubmit={(event) => {
          event.preventDefault();
          send(make);
        }}
      >
        <Field id="label" label={INVITE.label} value={label} onInput={setLabel} placeholder="Ada" fault={faults.fields.label} />
        <Field id="uses" label={INVITE.uses} numeric value={uses} onInput={setUses} fault={faults.fields.uses} />
        <Field id="days" label={INVITE.days} numeric value={days} onInput={setDays} fault={faults.fields.days} />
        <Choice type="checkbox" name="may-invite" label={INVITE.mayInvite} about={INVITE.mayInviteAbout} checked={mayInvite} onChange={setMayInvite} />
        <div>
          <button type="submit" class="button button-primary" aria-disabled={busy}>
            {INVITE.make}
          </button>
        </div>
      </form>
      <Fault id="invite-fault" text={faults.other} />
      {made && <Made made={made} />}
      <ul class="members">
        {run.invitations.map((one) => (
          <Issued key={one.key} one={one} mayRevoke={run.is_owner} actions={actions} onChange={onChange} />
        ))}
      </ul>
      {run.invitations.length === 0 && <p class="muted small">{INVITE.none}</p>}
    </Card>
  );
}

function Made({ made }: { made: MadeInvitationBody }) {
  const file = new Blob([`${made.link}\n`], { type: "text/plain" });
  const [url, setUrl] = useState("");
  useEffect(() => {
    const address = URL.createObjectURL(file);
    setUrl(address);
    return () => URL.revokeObjectURL(address);
  }, [made]);
  return (
    <div class="made-invitation" role="status">
      <p>
        {made.message} {INVITE.once}
      </p>
      <CopyLine text={made.link} name={INVITE.link} />
      <p>
        <a class="button" href={url} download={`${made.label.replace(/[^\w-]+/g, "-") || "invitation"}.neuroshard-invitation`}>
          {INVITE.save}
        </a>
      </p>
      <QrCode rows={made.qr} />
    </div>
  );
}

/** Always black on white: cameras read the reverse badly. */
function QrCode({ rows }: { rows: string[] }) {
  const size = rows.length + 2 * QUIET;
  const path = rows.flatMap((row, y) => [...row].map((module, x) => (module === "1" ? `M${x + QUIET} ${y + QUIET}h1v1h-1z` : ""))).join("");
  return (
    <svg class="qr" viewBox={`0 0 ${size} ${size}`} role="img" aria-label={INVITE.qr} shape-rendering="crispEdges">
      <rect width={size} height={size} fill="#fff" />
      <path d={path} fill="#000" />
    </svg>
  );
}

function Issued({ one, mayRevoke, actions, onChange }: { one: IssuedBody; mayRevoke: boolean; actions: NodeActions; onChange: () => Promise<void> }) {
  const { busy, faults, send } = useSending();
  const state = one.state === "valid" ? `${placesLeft(one.left, one.uses)}, until ${dateAndTime(one.not_after)}` : INVITE[one.state];
  const item = useRef<HTMLLIElement>(null);
  const revoke = async () => {
    await actions.revoke(one.key);
    await onChange();
    item.current?.focus(); // the button is gone
  };
  return (
    <li ref={item} tabIndex={-1}>
      <span>
        <strong>{one.label}</strong> <span class="muted small">{state}</span>
      </span>
      {mayRevoke && one.state !== "revoked" && (
        <button type="button" class="button" aria-disabled={busy} aria-label={`${INVITE.revoke}: ${one.label}`} onClick={() => send(revoke)}>
          {INVITE.revoke}
        </button>
      )}
      <Fault id={`revoke-${one.key}`} text={faults.other} />
    </li>
  );
}

function Deputies({ run, actions, onChange }: { run: RunMembersBody; actions: NodeActions; onChange: () => Promise<void> }) {
  const { busy, faults, send } = useSending();
  const trust = (wallet: string) => () =>
    send(async () => {
      await actions.nameDeputy(wallet);
      await onChange();
    });
  return (
    <Card title={DEPUTY.title}>
      <p>{DEPUTY.about}</p>
      {run.members.length === 0 && <p class="muted small">{DEPUTY.noMember}</p>}
      <ul class="members">
        {run.members.map((member) => (
          <li key={member.wallet_id}>
            <span>
              <strong>{member.label}</strong> <span class="muted small">{member.words}</span>
            </span>
            {run.deputies.includes(member.wallet_id) ? (
              <span class="muted small">{DEPUTY.is}</span>
            ) : (
              <button type="button" class="button" aria-disabled={busy} aria-label={`${DEPUTY.name}: ${member.label}`} onClick={trust(member.wallet_id)}>
                {DEPUTY.name}
              </button>
            )}
          </li>
        ))}
      </ul>
      <Fault id="deputy-fault" text={faults.other} />
    </Card>
  );
}

/** `startedAt` is of the node; it changes when the node has another run. */
function JoinAnother({ startedAt, members, actions, onChange }: { startedAt: number; members: MembersBody; actions: NodeActions; onChange: () => Promise<void> }) {
  const { invitation, fault } = members.shown;
  const [text, setText] = useState("");
  const [left, setLeft] = useState<number | null>(null); // start of the node that is leaving its run
  const facts = useRef<HTMLDivElement>(null);
  const { busy, faults, send } = useSending();
  const join = (runId: string | null) =>
    send(async () => {
      await actions.join(runId);
      setLeft(startedAt);
    });
  const change = (work: Promise<unknown>) =>
    send(async () => {
      await work;
      await onChange();
      (facts.current ?? document.getElementById("invitation"))?.focus(); // the button is gone
    });
  const wrong = faults.other || faults.fields.run_id;
  if (left === startedAt) {
    return (
      <Card title={OTHER_RUN.title} wide>
        <p role="status">{OTHER_RUN.leaving}</p>
      </Card>
    );
  }
  if (invitation !== null) {
    return (
      <Card title={SHOWN.title(invitation.name)} hint={SHOWN.about} wide>
        <div ref={facts} tabIndex={-1}>
          <InvitationFacts invitation={invitation} />
        </div>
        <p class="muted small">{OTHER_RUN.hint}</p>
        <Fault id="join-fault" text={wrong} />
        <div class="row-actions">
          <button type="button" class="button button-primary" aria-disabled={busy} onClick={() => join(invitation.run_id)}>
            {SHOWN.join}
          </button>
          <button type="button" class="button" aria-disabled={busy} onClick={() => change(actions.closeInvitation())}>
            Cancel
          </button>
        </div>
      </Card>
    );
  }
  return (
    <Card title={OTHER_RUN.title} hint={OTHER_RUN.hint} wide>
      <form
        onSubmit={(event) => {
          event.preventDefault();
          change(actions.showInvitation(text));
        }}
      >
        <InvitationField value={text} onInput={setText} fault={faults.fields.invitation ?? (text === "" ? (fault ?? undefined) : undefined)} />
        <Fault id="other-fault" text={wrong} />
        <button type="submit" class="button" aria-disabled={busy}>
          {PASTE.show}
        </button>
      </form>
      {members.nearby !== null && <NearbyRuns heading="h3" runs={members.nearby} busy={busy} onJoin={join} />}
      {members.runs.length > 0 && (
        <>
          <h3>{OTHER_RUN.known}</h3>
          <ul class="members">
            {members.runs.map((run) => (
              <li key={run.run_id}>
                <span>
                  <strong>{run.name || run.run_id.slice(0, 8)}</strong> <span class="muted small">{run.is_current ? OTHER_RUN.current : ""}</span>
                </span>
                {!run.is_current && (
                  <button type="button" class="button" aria-disabled={busy} onClick={() => join(run.run_id)}>
                    {OTHER_RUN.back}
                  </button>
                )}
              </li>
            ))}
          </ul>
          {members.runs.some((run) => run.is_current) && (
            <button type="button" class="button" aria-disabled={busy} onClick={() => join(null)}>
              {OTHER_RUN.own}
            </button>
          )}
        </>
      )}
    </Card>
  );
}
