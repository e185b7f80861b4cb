"use strict";
// Conversations in the browser's local storage, an entry each, so that two tabs do not overwrite each other's:
// { id, title, changed, messages: [{ role, content, reasoning }] }
const PREFIX = "exl2flow/conversation/";

function newConversation() {
  const id = Date.now().toString(36) + Math.random().toString(36).slice(2, 8);
  return { id, title: "", changed: Date.now(), messages: [] };
}

function loadConversation(id) {
  try {
    const found = JSON.parse(localStorage.getItem(PREFIX + id));
    return found && Array.isArray(found.messages) ? found : null;
  } catch { return null; }
}

// Return whether it is kept: the storage may be full, or switched off.
function saveConversation(conversation) {
  if (!conversation.title) conversation.title = conversation.messages[0].content.trim().slice(0, 80);
  conversation.changed = Date.now();
  try {
    localStorage.setItem(PREFIX + conversation.id, JSON.stringify(conversation));
    return true;
  } catch { return false; }
}

function deleteConversation(id) {
  try { localStorage.removeItem(PREFIX + id); } catch { /* nothing is kept */ }
}

// All that are kept, last changed first.
function listConversations() {
  try {
    return Object.keys(localStorage).filter((name) => name.startsWith(PREFIX))
      .map((name) => loadConversation(name.slice(PREFIX.length))).filter(Boolean)
      .sort((one, other) => other.changed - one.changed);
  } catch { return []; }
}
