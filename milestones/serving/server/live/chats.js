
// ---- Chats: several conversations, each with at most one request at a time -------------------

const QUESTIONS = [
  "Why is the sky blue?", "What does a cache do?", "How do birds find their way?",
  "What is a page table?", "Why do we have seasons?", "What does a compiler do?",
  "How is paper made?", "What is a radix tree?", "Why is the sea salty?",
  "What does a scheduler do?", "How do plants drink?", "What is a queue?",
];
let chats = [], numChats = 0;

/** Return the number of a request in the recording, or undefined. */
const numberOf = requestId =>
  Object.values(requests).find(request => request.request_id === requestId)?.number;

/** A conversation. `messages` are those of the API; an answer also has the id of its request. */
class Chat {
  constructor() {
    this.name = `chat ${++numChats}`;
    this.messages = [];
    this.waiting = null;  // the message that is being answered
    const button = (text, label, action) => {
      const made = h("button", { "aria-label": `${label} ${this.name}` }, text);
      made.addEventListener("click", action);
      return made;
    };
    this.mark = h("span");
    this.facts = h("div", { class: "facts" });
    this.stopButton = button("stop", "Stop", () => this.stop());
    this.talk = h("div", { class: "talk", tabindex: 0, "aria-label": `Text of ${this.name}` });
    this.input = h("input", { type: "text", placeholder: "Ask something",
                              "aria-label": `Message of ${this.name}` });
    const send = h("button", { "aria-label": `Send the message of ${this.name}` }, "Send");
    const form = h("form", {}, this.input, send);
    form.addEventListener("submit", event => {
      event.preventDefault();
      const text = this.input.value.trim();
      if (text && !this.waiting) this.ask(text);
    });
    this.card = h("div", { class: "card", role: "group", "aria-label": this.name },
      h("div", { class: "head" }, this.mark, h("span", {}, this.name), this.stopButton,
        button("✕", "Close", () => this.close())), this.facts, this.talk, form);
    this.draw();
  }
  async ask(text) {
    const { messages } = this, answer = { role: "assistant", content: "", id: null };
    play(true);  // in a frozen picture, the answer could not be seen
    this.input.value = "";
    this.waiting = answer;
    messages.push({ role: "user", content: text }, answer);
    this.draw();
    const sent = [{ role: "system", content: $("system").value },
                  ...messages.slice(0, -1).filter(message => !message.failed)];
    const body = { messages: sent.map(({ role, content }) => ({ role, content })), ...sampling() };
    try {
      answer.id = (await call("ask", body)).id;
      const ended = early.get(answer.id);  // it may have ended before its id was here
      if (ended) this.end(ended);
      early.delete(answer.id);
    } catch (error) {
      this.end({ text: "", error: error.message });
    }
    this.draw();
  }
  /** Take the end of the answer. */
  end({ text, error }) {
    if (!this.waiting) return;
    Object.assign(this.waiting, { content: text, failed: error ?? null });
    if (error) this.messages.at(-2).failed = "not answered";  // not a part of the next request
    this.waiting = null;
    this.draw();
  }
  stop() {
    if (this.waiting?.id) call("stop", { id: this.waiting.id }).catch(lost);
  }
  close() {
    this.stop();
    this.card.remove();
    chats = chats.filter(chat => chat !== this);
  }
  /** Return the text of an answer at the step that is shown. */
  textOf(message) {
    const number = message.id === null ? undefined : numberOf(message.id);
    if (number === undefined) return message.content;
    return state.requests[number]?.text ?? "";
  }
  draw() {
    const atEnd = this.talk.scrollTop + this.talk.clientHeight > this.talk.scrollHeight - 30;
    this.talk.replaceChildren(...this.messages.map(message => {
      const text = message.role === "user" ? message.content : this.textOf(message);
      const kind = message.failed && message.role !== "user" ? "failed" : message.role;
      return h("p", { class: kind }, kind === "failed" ? message.failed : text);
    }));
    if (atEnd) this.talk.scrollTop = this.talk.scrollHeight;
    this.stopButton.hidden = !this.waiting;
    this.drawFacts();
  }
  /** Show the request of the newest answer: its letter, as below, and its numbers. */
  drawFacts() {
    const message = this.messages.findLast(({ id }) => id);
    const number = message && numberOf(message.id), now = state?.requests[number];
    if (!now) {
      this.facts.textContent = this.waiting ? "sent" : "";
      this.mark.replaceChildren();
      delete this.card.dataset.request;
      return;
    }
    const { num_prompt_tokens: prompt, arrival, first_token: first, request_id } = requests[number];
    this.card.dataset.request = number;
    this.mark.replaceChildren(chip(number));
    const facts = [now.state,
                   meta.has_tree ? `${now.cached ?? 0} of ${prompt} cached` : `prompt ${prompt}`];
    if (first <= frames[indexOf(shown)].end) facts.push(`TTFT ${ms(first - arrival)}`);
    this.facts.textContent = facts.map(fact => fact.replaceAll(" ", "\u00a0")).join(" · ");
    this.facts.title = `${this.name}, request ${request_id}: ${facts.join(" · ")}`;
  }
}
function addChat() {
  const chat = new Chat();
  chats.push(chat);
  $("cards").append(chat.card);
  return chat;
}
function askAll() {
  chats.forEach((chat, n) => {
    const asked = chat.messages.length / 2;
    if (!chat.waiting) chat.ask(QUESTIONS[(n + 5 * asked) % QUESTIONS.length]);
  });
}
