package prefix

// ListBy has a subscription list so many places at once.
func (s *Subscription) ListBy(places int) { s.piece = places }
