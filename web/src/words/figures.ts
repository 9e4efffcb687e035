// Sentences with numbers in them: each number keeps its path in the node's status, which explains it. Pure.

import { EXPLANATIONS } from "../api/explanations";

/** A number of GET /api/status, as a reader sees it. */
export interface Figure {
  path: string; // of the value in the JSON, such as "peers.0.tokens_per_second"
  value: number | null | undefined;
  shown: string;
}

export type Said = readonly (string | Figure)[];

export function figure(path: string, value: number | null | undefined, words: (value: number | null | undefined) => string): Figure {
  return { path, value, shown: words(value) };
}

/** say`It read ${figure(...)} tokens.` */
export function say(texts: TemplateStringsArray, ...parts: readonly (string | Figure)[]): Said {
  return texts.flatMap((text, at) => (at < parts.length ? [text, parts[at]!] : [text])).filter((part) => part !== "");
}

/** The meaning of a figure and the place where REST has the same value. */
export function explanationOf(path: string): string {
  const meaning = EXPLANATIONS[path.replace(/\.\d+(?=\.)/g, "[]")];
  return `${meaning ?? "A number of this node"}. In /api/status: ${path}`;
}

export function plainText(said: Said): string {
  return said.map((part) => (typeof part === "string" ? part : part.shown)).join("");
}
