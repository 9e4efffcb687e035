// The first run: a few steps, one at a time. The step stands after the # of the address, so that Back and reload work.

import type { SetupBody } from "../api/bodies";
import type { ComponentChildren } from "preact";
import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";
import { NodeError } from "../api/client";
import { Banner } from "../components/parts";
import { ThemeToggle } from "../components/ThemeToggle";
import { ArriveStep, InvitationStep, TextStep } from "./ArriveSteps";
import { CheckStep, WordsStep } from "./BackupSteps";
import { ComputerStep } from "./ComputerStep";
import type { SetupCalls, Step } from "./setup";
import { allowedStep, STEPS } from "./setup";
import { StartStep } from "./StartStep";
import { WalletStep } from "./WalletStep";
import { WorkStep } from "./WorkStep";

const BEAT_MS = 3_000;
const HASH = "#setup-";
const PARTS: readonly { name: string; steps: readonly Step[] }[] = [
  { name: "Begin", steps: ["arrive", "invitation", "text"] },
  { name: "Wallet", steps: ["wallet"] },
  { name: "Backup", steps: ["words", "check"] },
  { name: "Computer", steps: ["computer"] },
  { name: "Work", steps: ["work"] },
  { name: "Start", steps: ["start"] },
];

export interface StepProps {
  setup: SetupBody;
  calls: SetupCalls;
  go: (step: Step) => void;
  onChange: (setup: SetupBody, next?: Step) => void;
}

export function Wizard({ calls }: { calls: SetupCalls }) {
  const [setup, setSetup] = useState<SetupBody | null>(null);
  const wanted = useWantedStep();
  const { gone, problem } = useHeartbeat(calls, setSetup, ({ arrival: { nearby } }) =>
    setSetup((present) => present && { ...present, arrival: { ...present.arrival, nearby } }),
  );
  const step = setup && allowedStep(setup, wanted);
  useLayoutEffect(() => {
    // A step that is over shows another one. Its address must not stay: Back would later lead to the last step there.
    if (step === null || wanted === null || wanted === step || stepFromHash() !== wanted) return;
    history.replaceState(null, "", HASH + step);
    dispatchEvent(new HashChangeEvent("hashchange"));
  }, [step, wanted]);
  if (setup === null || step === null) return <Frame>{problem ? <p role="alert">{problem}</p> : <p class="muted">Asking the program…</p>}</Frame>;
  const go = (next: Step) => {
    if (stepFromHash() === null) history.replaceState(null, "", HASH + step); // Back leads to what was shown here
    location.hash = HASH + next;
  };
  const onChange = (changed: SetupBody, next?: Step) => {
    setSetup(changed);
    if (next) go(next);
  };
  return (
    <Frame step={step}>
      {gone && (
        <Banner tone="bad" title="NeuroShard does not answer." live>
          It was closed before the end, so nothing is stored. Start it once more and continue here.
        </Banner>
      )}
      <StepOf key={step} step={step} {...{ setup, calls, go, onChange }} />
    </Frame>
  );
}

/**
 * Asks at once and again and again, so that the program knows of the page and the page of the program: whether that is
 * gone, and what was wrong last. The first answer, and that of a program that came back, is handed on. The later ones
 * only bring news: they may be older than the answer to something that was sent meanwhile.
 */
function useHeartbeat(
  calls: SetupCalls,
  onAnswer: (setup: SetupBody) => void,
  onNews: (setup: SetupBody) => void,
): { gone: boolean; problem: string } {
  const [gone, setGone] = useState(false);
  const [problem, setProblem] = useState("");
  useEffect(() => {
    let isAwaited = true;
    const beat = async () => {
      try {
        const setup = await calls.read();
        (isAwaited ? onAnswer : onNews)(setup);
        isAwaited = false;
        setGone(false);
        setProblem("");
      } catch (error) {
        const isGone = error instanceof NodeError && error.status === 0;
        isAwaited ||= isGone;
        setGone(isGone);
        setProblem(error instanceof Error ? error.message : String(error));
      }
    };
    void beat();
    const timer = setInterval(() => void beat(), BEAT_MS);
    return () => clearInterval(timer);
  }, [calls]);
  return { gone, problem };
}

function StepOf({ step, ...props }: StepProps & { step: Step }) {
  const heading = useFocusedHeading();
  return (
    <div ref={heading} class="setup-step">
      {step === "arrive" && <ArriveStep {...props} />}
      {step === "invitation" && <InvitationStep {...props} />}
      {step === "text" && <TextStep {...props} />}
      {step === "wallet" && <WalletStep {...props} />}
      {step === "words" && <WordsStep {...props} />}
      {step === "check" && <CheckStep {...props} />}
      {step === "computer" && <ComputerStep {...props} />}
      {step === "work" && <WorkStep {...props} />}
      {step === "start" && <StartStep {...props} />}
    </div>
  );
}

function Frame({ step, children }: { step?: Step; children: ComponentChildren }) {
  const current = PARTS.findIndex((part) => step !== undefined && part.steps.includes(step));
  return (
    <>
      <header class="top">
        <div class="top-row">
          <div class="brand">
            <img src="./favicon.svg" alt="" width="28" height="28" />
            <span class="brand-name">NeuroShard</span>
          </div>
          <ThemeToggle />
        </div>
      </header>
      <main id="main" class="setup">
        {step && (
          <ol class="setup-parts small" aria-label="Steps">
            {PARTS.map((part, index) => (
              <li
                key={part.name}
                class={index < current ? "setup-done" : ""}
                {...(index === current ? { "aria-current": "step" as const } : {})}
              >
                {part.name}
              </li>
            ))}
          </ol>
        )}
        <div class="card">{children}</div>
      </main>
    </>
  );
}

function useWantedStep(): Step | null {
  const [wanted, setWanted] = useState(stepFromHash);
  useEffect(() => {
    const changed = () => setWanted(stepFromHash());
    addEventListener("hashchange", changed);
    return () => removeEventListener("hashchange", changed);
  }, []);
  return wanted;
}

function stepFromHash(): Step | null {
  return STEPS.find((step) => location.hash === HASH + step) ?? null;
}

/** A new step is read from its heading on; the very first page leaves the focus where the browser put it. */
function useFocusedHeading() {
  const place = useRef<HTMLDivElement>(null);
  useLayoutEffect(() => {
    const heading = place.current?.querySelector("h1");
    document.title = `${heading?.textContent ?? "Set up"} · NeuroShard`;
    scrollTo({ top: 0 });
    if (location.hash.startsWith(HASH)) heading?.focus();
  }, []);
  return place;
}
