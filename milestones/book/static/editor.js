// The editor of an exercise: CodeMirror, with one state for each file.

import { defaultKeymap, history, historyKeymap, indentWithTab } from "./codemirror/codemirror-commands.js";
import { bracketMatching, indentOnInput, indentUnit, syntaxHighlighting } from "./codemirror/codemirror-language.js";
import { python } from "./codemirror/codemirror-lang-python.js";
import { EditorState } from "./codemirror/codemirror-state.js";
import { EditorView, highlightActiveLine, keymap, lineNumbers } from "./codemirror/codemirror-view.js";
import { classHighlighter } from "./codemirror/lezer-highlight.js";

export class Editor {
  // changed: called with the file and its text when the reader has changed it.
  // check: called when the reader presses Ctrl-Enter.
  constructor(parent, changed, check) {
    this.states = new Map();
    const run = { key: "Mod-Enter", run: () => (check(), true) };
    this.extensions = [
      lineNumbers(), history(), indentOnInput(), indentUnit.of("    "), bracketMatching(),
      highlightActiveLine(), python(), syntaxHighlighting(classHighlighter),
      keymap.of([run, indentWithTab, ...defaultKeymap, ...historyKeymap]),
      EditorView.updateListener.of((update) => {
        if (update.docChanged) changed(this.file, update.state.doc.toString());
      }),
    ];
    this.view = new EditorView({ parent });
  }

  // Show a file. `text` is its text if the editor does not have it yet, or if it is another one now.
  // symbol: a function to scroll to.
  show(file, text, symbol) {
    if (this.file) this.states.set(this.file, this.view.state);
    this.file = file;
    let state = this.states.get(file);
    if (state?.doc.toString() !== text) {
      const label = EditorView.contentAttributes.of({ "aria-label": `${file}, your code`, tabindex: "0" });
      state = EditorState.create({ doc: text, extensions: [this.extensions, label] });
    }
    this.view.setState(state);
    const place = symbol === undefined ? -1 : text.search(new RegExp(`def ${symbol}\\b`));
    if (place < 0) return;
    this.view.dispatch({ selection: { anchor: place } });
    this.view.requestMeasure({  // scroll the editor only, and not the page
      read: () => this.view.lineBlockAt(place).top,
      write: (top) => { this.view.scrollDOM.scrollTop = top - 20; },
    });
  }
}
