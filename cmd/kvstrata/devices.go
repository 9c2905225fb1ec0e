package main

import (
	"context"
	"fmt"
	"time"

	"golang.org/x/sync/errgroup"

	"kvstrata/bus"
	"kvstrata/connector/device/nvml"
	"kvstrata/event"
	"kvstrata/publisher"
)

type devicesCmd struct {
	natsLogin

	NATS     string        `name:"nats" help:"NATS servers, comma-separated." default:"nats://127.0.0.1:4222" env:"KVSTRATA_NATS"`
	Cluster  string        `help:"The engine's cluster." default:"default"`
	Model    string        `help:"The engine's model, as it serves it." required:""`
	Instance string        `help:"The engine's instance, as --engine names it." required:""`
	Rank     uint32        `help:"The engine's data-parallel rank." default:"0"`
	Device   []int         `help:"Devices by their index, comma-separated; without: all of the machine." placeholder:"N"`
	Every    time.Duration `help:"Between two samples." default:"1s"`
	Library  string        `help:"NVIDIA's management library." default:"libnvidia-ml.so.1" placeholder:"FILE"`
}

// Help shows how it is used.
func (devicesCmd) Help() string {
	return `Samples memory, load, power, temperature and PCIe traffic of this machine's NVIDIA devices, and tells them under an engine's name;
kvstrata query devices shows them. Example:

  kvstrata devices --nats nats://10.0.0.2:4222 --model meta/Llama-3.1-8B --instance decode-0 --device 0,1`
}

// Run samples until a signal comes.
func (c *devicesCmd) Run(a *app) error {
	if c.Every < 10*time.Millisecond {
		return usagef("--every %v: want 10ms or more", c.Every)
	}
	cfg := c.client(bus.DefaultConfig())
	cfg.URL = c.NATS
	if err := cfg.Validate(); err != nil {
		return usagef("%w", err)
	}
	library, err := nvml.Open(c.Library, c.Device...)
	if err != nil {
		return err
	}
	defer library.Close()
	b, err := bus.Attach(a.ctx, cfg, "kvstrata devices", a.log)
	if a.ctx.Err() != nil {
		return nil
	}
	if err != nil {
		return err
	}
	defer b.Close()
	source := event.Source{Cluster: c.Cluster, Model: c.Model, Instance: c.Instance, Rank: c.Rank, Origin: event.Engine}
	records := publisher.NewRecords(b, a.log)
	fmt.Fprintf(a.stdout, "kvstrata devices: %d of %s every %v\n", library.Devices(), source, c.Every)
	group, ctx := errgroup.WithContext(a.ctx)
	group.Go(func() error { return records.Run(ctx) })
	group.Go(func() error { return c.sample(ctx, a, library, source, records) })
	err = group.Wait()
	if n := records.Dropped(); n > 0 {
		a.log.Warn("samples were lost: NATS did not take them in time", "samples", n)
	}
	return err
}

// sample reads the devices until ctx ends. One that does not answer is told once, and asked again.
func (c *devicesCmd) sample(ctx context.Context, a *app, library *nvml.Library, source event.Source, records *publisher.Records) error {
	tick := time.NewTicker(c.Every)
	defer tick.Stop()
	failed := false
	for {
		samples, err := library.Sample(source, event.UnixTime(time.Now()))
		switch {
		case err != nil && !failed:
			a.log.Warn("a device does not answer; asking again", "err", err)
		case err == nil:
			records.Record(event.Records{Samples: samples})
		}
		failed = err != nil
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}
