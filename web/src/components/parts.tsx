// Small presentational pieces that every view uses.

import type { ComponentChildren } from "preact";
import { useEffect, useRef } from "preact/hooks";
import { percent } from "../format";
import type { Tone } from "../words/verdict";

export function Card(props: { title: string; hint?: string; wide?: boolean; children: ComponentChildren; aside?: ComponentChildren }) {
  const id = `card-${props.title.toLowerCase().replace(/[^a-z]+/g, "-")}`;
  return (
    <section class={`card ${props.wide ? "card-wide" : ""}`} aria-labelledby={id}>
      <header class="card-head">
        <div>
          <h2 id={id}>{props.title}</h2>
          {props.hint && <p class="muted small">{props.hint}</p>}
        </div>
        {props.aside}
      </header>
      {props.children}
    </section>
  );
}

/** A subject of a view, which an address can name: "#/rounds". */
export function Section(props: { title: string; children: ComponentChildren; aside?: ComponentChildren }) {
  const id = props.title.toLowerCase();
  const title = useRef<HTMLHeadingElement>(null);
  useEffect(() => {
    const look = () => {
      if (location.hash.replace(/^#\/?/, "").toLowerCase() === id && title.current) showSubject(title.current);
    };
    look();
    addEventListener("hashchange", look);
    return () => removeEventListener("hashchange", look);
  }, [id]);
  return (
    <section class="subject" id={id} aria-labelledby={`title-${id}`}>
      <div class="view-head">
        <h2 class="subject-title" id={`title-${id}`} tabIndex={-1} ref={title}>
          {props.title}
        </h2>
        {props.aside}
      </div>
      {props.children}
    </section>
  );
}

/** Scrolls to a subject, and once more when the subjects before it have read their data. */
function showSubject(title: HTMLElement): void {
  title.focus({ preventScroll: true });
  title.scrollIntoView();
  setTimeout(() => {
    if (document.activeElement === title) title.scrollIntoView();
  }, 500);
}

export function Stat(props: { label: string; value: ComponentChildren; note?: string; tone?: Tone }) {
  return (
    <div class={`stat ${props.tone ? `tone-${props.tone}` : ""}`}>
      <dt>{props.label}</dt>
      <dd class="stat-value">{props.value}</dd>
      {props.note !== undefined && <dd class="muted small">{props.note}</dd>}
    </div>
  );
}

export function Facts({ rows }: { rows: (readonly [string, ComponentChildren] | null)[] }) {
  return (
    <dl class="facts">
      {rows.map(
        (row) =>
          row && (
            <div key={row[0]}>
              <dt>{row[0]}</dt>
              <dd>{row[1]}</dd>
            </div>
          ),
      )}
    </dl>
  );
}

/** A labelled bar; fraction null means "busy, nobody knows how long". */
export function Bar(props: { label: string; fraction: number | null; text?: string; tone?: Tone }) {
  const known = props.fraction !== null;
  const share = known ? Math.min(Math.max(props.fraction ?? 0, 0), 1) : 0;
  return (
    <div class="bar">
      <div class="bar-text small">
        <span>{props.label}</span>
        <span class="muted">{props.text ?? (known ? percent(share) : "")}</span>
      </div>
      <div
        class={`bar-track ${known ? "" : "bar-busy"} ${props.tone ? `tone-${props.tone}` : ""}`}
        role="progressbar"
        aria-label={props.label}
        aria-valuemin={0}
        aria-valuemax={100}
        {...(known ? { "aria-valuenow": Math.round(share * 100) } : {})}
        {...(props.text ? { "aria-valuetext": props.text } : {})}
      >
        <div class="bar-fill" style={{ width: `${share * 100}%` }} />
      </div>
    </div>
  );
}

const PATHS: Record<string, string> = {
  good: "M5 12.5l4.5 4.5L19 7.5",
  busy: "M12 6v6l4 2",
  warn: "M12 7v6M12 16.6v.2",
  bad: "M7.5 7.5l9 9M16.5 7.5l-9 9",
  moon: "M20 14.5A8 8 0 0 1 9.5 4 8 8 0 1 0 20 14.5z",
  sun: "M12 4v1.5M12 18.5V20M4 12h1.5M18.5 12H20M6.3 6.3l1 1M16.7 16.7l1 1M17.7 6.3l-1 1M7.3 16.7l-1 1M12 8.5a3.5 3.5 0 1 0 0 7 3.5 3.5 0 0 0 0-7z",
  pause: "M9 6v12M15 6v12",
  play: "M8 5.5l10 6.5-10 6.5z",
  stop: "M7 7h10v10H7z",
};

export function Icon({ name }: { name: keyof typeof PATHS }) {
  return (
    <svg class="icon" viewBox="0 0 24 24" aria-hidden="true" focusable="false">
      <path d={PATHS[name]} fill="none" stroke="currentColor" stroke-width="2" stroke-linecap="round" stroke-linejoin="round" />
    </svg>
  );
}

export function ToneMark({ tone }: { tone: Tone }) {
  return (
    <span class={`mark tone-${tone}`}>
      <Icon name={tone} />
    </span>
  );
}

export function Banner(props: { tone: Tone; title: string; children?: ComponentChildren; live?: boolean; action?: ComponentChildren }) {
  return (
    <div class={`banner tone-${props.tone}`} {...(props.live ? { role: "alert" } : {})}>
      <ToneMark tone={props.tone} />
      <div class="banner-text">
        <strong>{props.title}</strong> {props.children}
      </div>
      {props.action}
    </div>
  );
}

/** Members of a button that does nothing while it is off. It stays focusable: a `disabled` one would lose the keyboard's place. */
export function actionOf(isOff: boolean, act: () => void): { "aria-disabled": boolean; onClick: () => void } {
  return {
    "aria-disabled": isOff,
    onClick: () => {
      if (!isOff) act();
    },
  };
}
