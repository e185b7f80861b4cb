"use strict";
// Markdown of a model as elements of the page. markdown-it only splits the text into tokens: no HTML is ever
// parsed, so what looks like HTML is shown as it was written.
const markdown = markdownit({ html: false, linkify: true, breaks: true }).disable("image");
markdown.linkify.set({ fuzzyLink: false, fuzzyEmail: false, fuzzyIP: false });
markdown.validateLink = (url) => /^(https?|mailto):/i.test(url.trim());

const TAGS = new Set("p h3 h4 h5 h6 ul ol li blockquote hr br em strong s a table thead tbody tr th td".split(" "));

function element(tag, className, ...content) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  made.append(...content);
  return made;
}

function codeBlock(token) {
  const copy = element("button", "copy", "Copy");
  copy.type = "button";
  const language = token.info.trim().split(/\s/)[0].slice(0, 30);
  const pre = element("pre", "", element("code", "", token.content.replace(/\n$/, "")));
  pre.tabIndex = 0;  // scrolled by keys
  return element("div", "code", element("div", "", element("span", "", language || "text"), copy), pre);
}

// The element that a token opens; headings stand below those of the page. What is not known is shown as text.
function opened(token) {
  const tag = token.tag.replace(/^h([1-6])$/, (_, level) => "h" + Math.min(6, Number(level) + 2));
  const made = element(TAGS.has(tag) ? tag : "span", "", token.content);
  if (tag === "a") {
    made.href = token.attrGet("href");
    made.rel = "noopener noreferrer nofollow";
    made.target = "_blank";
  }
  if (tag === "ol" && token.attrGet("start")) made.start = token.attrGet("start");
  if (tag === "th" || tag === "td") made.className = (token.attrGet("style") || "").replace("text-align:", "");
  return made;
}

function build(tokens, parent) {
  const open = [parent];
  for (const token of tokens) {
    const here = open.at(-1);
    if (token.hidden) continue;  // the paragraphs of a tight list
    if (token.type === "inline") build(token.children, here);
    else if (token.type === "text") here.append(token.content);
    else if (token.type === "code_inline") here.append(element("code", "", token.content));
    else if (token.type === "fence" || token.type === "code_block") here.append(codeBlock(token));
    else if (token.nesting < 0) open.pop();
    else {
      const made = opened(token);
      here.append(token.tag === "table" ? element("div", "table", made) : made);
      if (token.nesting > 0) open.push(made);
    }
  }
  return parent;
}

// Show a text that may have grown: blocks that are the same stay, and with them what is selected in them.
function showMarkdown(place, text) {
  const blocks = [...build(markdown.parse(text, {}), document.createElement("div")).children];
  blocks.forEach((block, index) => {
    const old = place.children[index];
    if (!old) place.append(block);
    else if (!old.isEqualNode(block)) old.replaceWith(block);
  });
  while (place.children.length > blocks.length) place.lastElementChild.remove();
}

// The clipboard of browsers is for encrypted addresses and this machine only; others have the older way.
async function copyText(text, button) {
  if (navigator.clipboard) await navigator.clipboard.writeText(text);
  else {
    const field = element("textarea", "unseen", text);
    button.after(field);
    field.select();
    document.execCommand("copy");
    field.remove();
    button.focus();
  }
  button.textContent = "Copied";
  setTimeout(() => { button.textContent = "Copy"; }, 1500);
}
