package prefix

import (
	"errors"
	"sync"

	"kvstrata/event"
)

// WatchRequest names what a subscriber wants to hear of: one source, or the sources of a model, and of these all blocks or those of
// one prefix.
type WatchRequest struct {
	Source string `json:"source,omitempty"` // as [event.Source.Tokens]; with nothing else
	Request
}

// Validate reports every problem at once.
func (r *WatchRequest) Validate() error {
	of := &r.Request
	if r.Source == "" {
		if of.Model == "" {
			return errors.New("source, model: give one of them")
		}
		return of.Validate()
	}
	if of.Model != "" || of.Cluster != "" || of.LoRA != "" || of.Salt != "" || len(of.Tokens)+len(of.Hashes) > 0 || of.BlockSize != 0 {
		return errors.New("source: goes with nothing else; a prefix goes with its model")
	}
	return nil
}

// watch is what one subscriber wants.
type watch struct {
	index   *Index
	only    *source // nil: those of the model
	model   *model
	cluster string // empty = all
	request *Request
	isAll   bool // blocks of every prefix, and those without a name

	mu       sync.Mutex
	prefixes map[variant]map[event.PrefixHash]bool // the wanted ones by how they are cut: a new way may appear at any time
}

// watch resolves a request. The caller holds the write lock.
func (x *Index) watch(r *WatchRequest) (w *watch, err error) {
	w = &watch{index: x}
	if r.Source != "" {
		w.isAll = true
		w.only, err = x.sourceNamed(r.Source)
		return w, err
	}
	if w.model, err = x.serving(r.Model); err != nil {
		return w, err
	}
	request := r.Request
	w.cluster, w.request, w.isAll = request.Cluster, &request, len(request.Tokens)+len(request.Hashes) == 0
	w.prefixes = make(map[variant]map[event.PrefixHash]bool)
	return w, nil
}

func (w *watch) source(s *source) bool {
	if w.only != nil {
		return s == w.only
	}
	return s.model == w.model && (w.cluster == "" || s.name.Cluster == w.cluster)
}

// block reports whether a block is wanted.
func (w *watch) block(p event.PrefixHash, v variant) bool {
	if w.isAll {
		return true
	}
	if p == 0 {
		return false
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	set := w.prefixes[v]
	if set == nil {
		list := w.index.prefixes(w.request, v)
		set = make(map[event.PrefixHash]bool, len(list))
		for _, p := range list {
			set[p] = true
		}
		w.prefixes[v] = set
	}
	return set[p]
}
