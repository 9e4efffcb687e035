// The strings about tokens for programs that use the model.

export const TOKENS = {
  title: "Use it from other programs",
  hint: "Programs made for OpenAI's API can use this model. Give every program its own token. A token opens the model and nothing else.",
  address: "Enter this address as the base URL, and the token as the API key. The model is called neuroshard.",
  addressName: "Address of the model",
  name: "Name of the program",
  make: "Make a token",
  once: "Copy the token now: this computer keeps only a fingerprint of it.",
  token: (name: string) => `Token of ${name}`,
  since: (time: string) => `since ${time}`,
  remove: "Remove",
};
